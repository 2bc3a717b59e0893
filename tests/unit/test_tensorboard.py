"""TensorBoard itself finds what a run writes."""

import subprocess
import sys

from megatron_tlt.metrics import TensorBoardSink


def test_inspect_sees_every_tag_by_iteration_and_by_samples(tmp_path):
    sink = TensorBoardSink(tmp_path)
    for step in (1, 2):
        metrics = {"lm loss": 3.0 / step, "rollout/raw_reward": 0.5}
        sink.write("train", metrics, iteration=step, samples=16 * step)
    sink.close()
    done = subprocess.run(
        [sys.executable, "-m", "tensorboard.main", "--inspect", "--logdir", str(tmp_path)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    scalars = done.stdout.split("scalars", 1)[1]
    for tag in ("lm loss", "lm loss vs samples", "rollout/raw_reward", "rollout/raw_reward vs samples"):
        assert tag in done.stdout
    assert "max_step             32" in scalars and "num_steps            4" in scalars
