"""Drafter folders: what is written is what is read, and what SGLang would misread is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_tlt.draft.export import check_fits, export_drafter, import_drafter, read_drafter_config
from megatron_tlt.models.drafter import DrafterConfig
from tests.unit.rollout_models import make_drafter, reference

# Names and shapes as SGLang 0.5.21's llama_eagle.py, llama_eagle3.py load them; h 32, f 48, v 61, draft 41.
LAYER = {
    "self_attn.q_proj.weight": (32, 32), "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32), "self_attn.o_proj.weight": (32, 32),
    "mlp.gate_proj.weight": (48, 32), "mlp.up_proj.weight": (48, 32), "mlp.down_proj.weight": (32, 48),
    "post_attention_layernorm.weight": (32,),
}  # fmt: skip
WIDE = {f"self_attn.{x}_proj.weight": (n, 64) for x, n in (("q", 32), ("k", 16), ("v", 16))}
SHAPES = {
    "eagle": {f"layers.0.{k}": v for k, v in LAYER.items()} | {"fc.weight": (32, 64), "fc.bias": (32,)},
    "eagle3": {f"midlayer.{k}": v for k, v in (LAYER | WIDE).items()}
    | {
        "midlayer.input_layernorm.weight": (32,), "midlayer.hidden_norm.weight": (32,), "norm.weight": (32,),
        "fc.weight": (32, 96), "lm_head.weight": (41, 32), "d2t": (41,), "t2d": (61,),
    },
}  # fmt: skip
LAYOUTS = pytest.mark.parametrize("layout", ["eagle", "eagle3"])


@pytest.fixture
def target():
    return reference("llama").config.to_dict()


def written(tmp_path, target, layout, **options):
    drafter = make_drafter(layout=layout)
    export_drafter(drafter, tmp_path / "draft", target=target, **options)
    return drafter, tmp_path / "draft"


@LAYOUTS
def test_a_folder_has_sglangs_names_and_comes_back_bit_by_bit(layout, tmp_path, target):
    drafter, folder = written(tmp_path, target, layout)
    stored = load_file(folder / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in stored.items()} == SHAPES[layout]
    back = import_drafter(folder, target=target)
    assert back.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)
    config = json.loads((folder / "config.json").read_text())
    names = {"eagle": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"}
    assert config["architectures"] == [names[layout]] and config["torch_dtype"] == "float32"


@LAYOUTS
def test_bfloat16_rounds_weights_but_no_vocabulary(layout, tmp_path, target):
    drafter, folder = written(tmp_path, target, layout, dtype=torch.bfloat16)
    back = import_drafter(folder)
    for name, tensor in drafter.state_dict().items():
        wanted = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(back.state_dict()[name], wanted)


def test_an_aux_layer_id_names_the_layer_before_the_captured_input(tmp_path, target):
    fields = {name: getattr(make_drafter(layout="eagle3").config, name) for name in DrafterConfig.__slots__}
    config = DrafterConfig(**fields | {"feature_layers": (1, 2, 3)})
    assert config.to_hf()["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"feature layers \(1, 2, 3\) are not all in a target of 3 layers"):
        check_fits(config, target)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocab_size", 99, "vocab_size is 61 in the drafter and 99"),
        ("hidden_size", 64, "hidden_size is 32 in the drafter and 64"),
        ("max_position_embeddings", 4096, "less than the target's 4096"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5}, "rope_theta is 10000.0"),
    ],
)
def test_a_drafter_of_another_target_is_refused(field, value, message, target):
    with pytest.raises(ValueError, match=message):
        check_fits(make_drafter().config, target | {field: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is no drafter"),
        ({"rope_theta": None}, "has no rope_theta: SGLang would take 10000"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type='llama3'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ({"max_position_embeddings": None}, "lacks .'max_position_embeddings'"),
        ({"intermediate_size": 64}, r"config.json wants \(\d+, \d+\)"),
    ],
)
def test_a_config_that_would_be_misread_is_refused(change, message, tmp_path, target):
    _, folder = written(tmp_path, target, "eagle")
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        import_drafter(folder)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("eagle", lambda t: t.pop("fc.bias"), r"missing \['fc.bias'\]"),
        ("eagle", lambda t: t.update(extra=torch.ones(1)), r"unknown \['extra'\]"),
        ("eagle", lambda t: t["fc.weight"].fill_(float("nan")), "not finite"),
        ("eagle3", lambda t: t["t2d"].fill_(True), "different draft vocabularies"),
    ],
)
def test_incomplete_weights_are_refused(layout, change, message, tmp_path, target):
    _, folder = written(tmp_path, target, layout)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        import_drafter(folder)


def test_the_targets_tables_in_a_file_are_left_out(tmp_path, target):
    drafter, folder = written(tmp_path, target, "eagle")
    tensors = {f"model.{k}": v for k, v in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"model.embed_tokens.weight": torch.ones(61, 32)}, folder / "model.safetensors")
    assert read_drafter_config(folder) == drafter.config
    back = import_drafter(folder, target=target)
    assert torch.equal(back.fc.weight, drafter.fc.weight)
