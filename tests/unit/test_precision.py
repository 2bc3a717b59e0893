"""The precision section: what is refused, with the numbers, and which layers run in FP8."""

import pytest

from megatron_tlt.models.gpt import ModelConfig
from megatron_tlt.models import te
from megatron_tlt.models.precision import PrecisionConfig
from megatron_tlt.subnet.alignment import check_slices
from megatron_tlt.subnet.config import EstConfig
from megatron_tlt.subnet.schedule import build_schedule
from megatron_tlt.subnet.shape import ModelShape
from tests.dist.runs import run_config

GPT2 = ModelConfig(preset="gpt2-124m")
TINYLLAMA = ModelConfig(preset="tinyllama-1.1b")
REFUSED = {
    "ends in bf16 with delayed scaling": (
        {"fp8": "hybrid", "first_last_layers_bf16": True}, "first_last_layers_bf16 does not go with"
    ),
    "no FP8": ({"first_last_layers_bf16": True}, "need precision.fp8"),
    "weights in FP8 without FP8": ({"fp8_param_gather": True}, "need precision.fp8"),
    "a window of tensorwise scaling": (
        {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_amax_history_len": 16},
        "fp8_amax_history_len=16 and .* belong to delayed scaling",
    ),
    "no window": ({"fp8": "hybrid", "fp8_amax_history_len": 0}, "=0 must be at least 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_refused(case):
    fields, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        PrecisionConfig(**fields)


def test_layers_at_both_ends_stay_out_of_fp8():
    precision = PrecisionConfig(
        fp8="hybrid", fp8_recipe="tensorwise", first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=1,
    )  # fmt: skip
    runs = [precision.layer_recipe(layer, 6) is not None for layer in range(6)]
    assert runs == [False, False, True, True, True, False]
    everywhere = PrecisionConfig(fp8="hybrid", fp8_recipe="tensorwise")
    assert all(everywhere.layer_recipe(layer, 6) for layer in range(6))
    assert PrecisionConfig().layer_recipe(0, 6) is None


def check(model: ModelConfig, recipe: str, tensor: int, micro_batch: int = 4) -> None:
    PrecisionConfig(fp8="e4m3", fp8_recipe=recipe).check_shapes(
        model, tensor_model_parallel_size=tensor, micro_batch_size=micro_batch
    )


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_published_shapes_fit_every_recipe(recipe):
    check(GPT2, recipe, 1)
    check(TINYLLAMA, recipe, 4)


def test_sizes_of_a_rank_that_do_not_fit_are_named():
    """GPT-2 at TP 4: 3 heads of 64 and 3 x 3 x 64 rows, 768 neurons."""
    check(GPT2, "mxfp8", 4)
    message = "rows of a TP rank = 576, attention output of a TP rank = 192"
    with pytest.raises(ValueError, match=message):
        check(GPT2, "blockwise", 4)
    short = ModelConfig(preset="gpt2-124m", seq_length=72)
    with pytest.raises(ValueError, match="tokens of a micro-batch .* = 72: "):
        check(short, "mxfp8", 1, micro_batch=1)


def slices(model: ModelConfig, alignment: int, tensor: int, **est: object) -> None:
    options = {"schedule": "practical", "ends": [2, 4], "ends_in": "steps"} | est
    schedule = build_schedule(
        EstConfig(**options), ModelShape.of(model, padded_vocab_size=50304), train_iters=10, seed=1,
        tokens_after=lambda n: n,
    )  # fmt: skip
    check_slices(
        schedule, alignment=alignment, reason="recipe", tensor_model_parallel_size=tensor
    )


def test_half_of_the_published_shapes_fits_as_in_the_alignment_table():
    """Kept query, key and value rows, attention columns and neurons of a rank at rate 1/2, by hand."""
    for model, tensor in ((GPT2, 1), (TINYLLAMA, 1), (TINYLLAMA, 2)):
        slices(model, 128, tensor, tp_strata=2, mlp_align=128)
    slices(GPT2, 32, 2, mlp_align=32)
    slices(TINYLLAMA, 32, 4, mlp_align=32)


def test_misaligned_slices_are_refused_with_the_numbers():
    """GPT-2 at TP 2 keeps 3 heads: 576 rows and 192 columns. TinyLlama at TP 4: 704 neurons."""
    message = (
        "recipe multiplies in pieces of 128, .* rows of a TP rank = 576 and attention output of a TP rank"
        " = 192 of a subnet with heads at 1/2"
    )
    with pytest.raises(ValueError, match=message):
        slices(GPT2, 128, 2, tp_strata=2)
    with pytest.raises(ValueError, match="neurons of a TP rank = 704 .* set est.mlp_align=128"):
        slices(TINYLLAMA, 128, 4, tp_strata=4)


def test_a_run_checks_layout_and_subnets_before_it_begins(tmp_path):
    with pytest.raises(ValueError, match="model.hidden_size = 64"):
        run_config(tmp_path, precision={"fp8": "e4m3", "fp8_recipe": "blockwise"}).check(1)
    stored = {"fp8": "hybrid", "fp8_param_gather": True}
    with pytest.raises(ValueError, match="fp8_param_gather=true needs .*transformer_engine"):
        run_config(tmp_path, precision=stored).check(1)
    with pytest.raises(ValueError, match="fp8_param_gather=true does not go with est.schedule"):
        run_config(tmp_path, precision=stored, est={"schedule": "practical"}).subnet_schedule(
            1, vocab_size=128
        )
    run_config(tmp_path, precision={"fp8": "hybrid"}, est={"schedule": "practical"}).check(1)


@pytest.mark.skipif(te.HAVE_TE, reason="Transformer Engine is installed")
def test_transformer_engine_that_is_not_there_is_refused_at_the_start(tmp_path):
    precision = {"transformer_impl": "transformer_engine"}
    assert not PrecisionConfig().uses_transformer_engine
    with pytest.raises(ValueError, match="needs Transformer Engine: pip install -r requirements-gpu"):
        run_config(tmp_path, precision=precision).check(1)
    with pytest.raises(ValueError, match="needs Transformer Engine"):
        te.te_layer_spec()


def test_only_transformer_engine_is_told_through_megatrons_configuration():
    assert PrecisionConfig(fp8="hybrid", transformer_impl="local").megatron_fields() == {}
    fields = PrecisionConfig(fp8="hybrid", transformer_impl="transformer_engine").megatron_fields()
    assert fields["fp8"] == "hybrid" and fields["fp8_recipe"] == "delayed"
    assert fields["fp8_param"] is False


class _LinearOfAnotherRelease:
    def forward(self, x):
        return x @ self.weight.t()


def test_a_release_that_reads_its_weights_otherwise_is_found_out(monkeypatch):
    monkeypatch.setattr(_LinearOfAnotherRelease, "__module__", "transformer_engine.pytorch")
    monkeypatch.setattr(te.importlib.metadata, "version", lambda name: "9.9.9")
    with pytest.raises(RuntimeError, match="Transformer Engine 9.9.9: .* does not call"):
        te.check_weight_source(_LinearOfAnotherRelease)
