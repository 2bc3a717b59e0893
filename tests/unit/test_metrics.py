"""Metrics reach their files, under the names people already plot, NaN included."""

import json
import math

from megatron_tlt.metrics import JsonlSink, MetricSinks, TensorBoardSink
from megatron_tlt.train.log_line import (
    Interval,
    measure_speed,
    perplexity,
    training_line,
    validation_line,
)
from megatron_tlt.train.step import StepResult

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def result(loss, grad_norm=1.0, updated=True):
    return StepResult(
        loss=loss,
        num_tokens=10,
        grad_norm=grad_norm,
        finite_loss=math.isfinite(loss),
        finite_grad_norm=math.isfinite(grad_norm),
        updated=updated,
    )


def test_jsonl_appends_and_keeps_nan_readable(tmp_path):
    path = tmp_path / "logs" / "metrics.jsonl"
    for iteration, loss in ((1, 2.5), (2, math.nan), (3, -math.inf)):
        sink = JsonlSink(path)
        sink.write("train", {"lm loss": loss}, iteration=iteration, samples=8 * iteration)
        sink.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["lm loss"] for line in lines] == [2.5, "nan", "-inf"]
    assert [line["consumed_samples"] for line in lines] == [8, 16, 24]


def test_tensorboard_has_megatrons_tags_by_iteration_and_by_samples(tmp_path):
    sinks = MetricSinks([TensorBoardSink(tmp_path)])
    sinks.write("train", {"lm loss": 2.5, "grad-norm": 1.5}, iteration=3, samples=24)
    sinks.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {
        "lm loss", "lm loss vs samples", "grad-norm", "grad-norm vs samples",
    }  # fmt: skip
    by_samples = events.Scalars("lm loss vs samples")[0]
    assert (by_samples.step, by_samples.value) == (24, 2.5)


def test_a_nan_or_negative_loss_is_printed_and_never_averaged_away():
    for losses, word in (([1.0, math.nan, 3.0], "lm loss: NAN"), ([-2.0], "lm loss: -2.000000E+00")):
        interval = Interval()
        for loss in losses:
            interval.add(result(loss), seconds=0.5, tokens=100, flops_per_token=1e6)
        assert word in training_line(line_metrics(interval), iteration=3, train_iters=10)


def line_metrics(interval):
    speed = measure_speed(interval, dense_flops_per_token=1e6, world_size=2, peak_flops=1e9)
    return {
        "lm loss": interval.loss, "grad-norm": 1.0, "learning-rate": 1e-4, "batch-size": 8,
        "consumed-samples": 24, "skipped-iterations": 0, "nan-iterations": 1, "nan-grad-norms": 0,
        "iteration-time": speed.seconds_per_iteration, "tokens-per-second": speed.tokens_per_second,
        "throughput": speed.tflops_per_device, "mfu": speed.mfu,
    }  # fmt: skip


def test_the_line_has_the_fields_that_scripts_look_for_in_megatrons_order():
    interval = Interval()
    interval.add(result(2.0), seconds=0.5, tokens=100, flops_per_token=1e6)
    line = training_line(line_metrics(interval), iteration=3, train_iters=10)
    names = [
        "iteration        3/      10", "consumed samples:", "elapsed time per iteration (ms): 500.0",
        "throughput per GPU (TFLOP/s/GPU):", "learning rate:", "global batch size:", "lm loss:",
        "grad norm:", "number of skipped iterations:", "number of nan iterations:   1",
        "tokens/s: 200", "MFU: 10.0%", "ETA: 0:00:04",
    ]  # fmt: skip
    positions = [line.index(name) for name in names]
    assert positions == sorted(positions)


def test_speed_is_per_device_and_mfu_a_share_of_all_devices():
    interval = Interval()
    for _ in range(4):
        interval.add(result(1.0), seconds=0.25, tokens=500, flops_per_token=3e6)
    speed = measure_speed(interval, dense_flops_per_token=6e6, world_size=4, peak_flops=3e9)
    assert speed.tokens_per_second == 2000
    assert speed.tflops_per_device == 2000 * 3e6 / 4 / 1e12
    assert speed.dense_tflops_per_device == 2000 * 6e6 / 4 / 1e12
    assert speed.mfu == 0.5


def test_perplexity_is_capped_and_keeps_nan():
    assert perplexity(0.0) == 1.0 and perplexity(50.0) == math.exp(20)
    assert math.isnan(perplexity(math.nan))
    assert "NAN" in validation_line(math.nan, iteration=1, train_iters=2, tokens=3)
