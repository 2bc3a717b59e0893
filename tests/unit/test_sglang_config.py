"""What SGLang is told and what it is refused, without SGLang."""

from pathlib import Path

import pytest
import torch

from megatron_tlt.rl.config import RolloutConfig
from megatron_tlt.rollout.sglang import process
from megatron_tlt.rollout.sglang.answers import (
    check_speculation,
    feature_sample,
    rollout_of,
    sampling_fields,
    versions_of,
)
from megatron_tlt.rollout.sglang.config import SglangConfig, engine_arguments
from megatron_tlt.rollout.sglang.store import WeightStore
from megatron_tlt.types import Prompt, SamplingParams, Strategy
from tests.dist.rl_tasks import rl_config
from tests.unit.rollout_models import make_engine, reference

CHAIN = Strategy(drafter="eagle", num_steps=3, num_draft_tokens=4)
PLACES = dict(target=Path("models/target"), draft=Path("models/draft"))


@pytest.mark.parametrize("eagle3", [False, True])
def test_the_devices_differ_in_a_dictionary_only(eagle3):
    config = SglangConfig(strategy=CHAIN, max_total_tokens=999, dtype=torch.bfloat16)
    cpu, cuda = (engine_arguments(config, device=d, eagle3=eagle3, **PLACES) for d in ("cpu", "cuda"))
    assert cpu["speculative_algorithm"] == ("EAGLE3" if eagle3 else "EAGLE")
    assert (cpu["speculative_num_steps"], cpu["speculative_eagle_topk"]) == (3, 1)
    assert cpu["dtype"] == "bfloat16" and cpu["max_total_tokens"] == 999
    assert {k: v for k, v in cpu.items() if k in cuda} == cuda
    only = {"device", "disable_cuda_graph", "sleep_on_idle"}
    assert all("backend" in k or k in only for k in cpu.keys() - cuda.keys())


def test_given_arguments_win():
    config = SglangConfig(arguments={"random_seed": 5, "enable_memory_saver": True})
    arguments = engine_arguments(config, device="cuda", eagle3=False, target=Path("t"), draft=None)
    assert arguments["random_seed"] == 5 and arguments["enable_memory_saver"]
    assert "speculative_algorithm" not in arguments


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(strategy=Strategy(drafter="subnet", num_steps=1, num_draft_tokens=2)), "no drafter 'subnet'"),
        (dict(max_restarts=-1), "max_restarts=-1"),
        (dict(strategy=CHAIN, adaptive_steps=(0, 1)), "must be among them"),
        (dict(max_running_requests=0), "at least 1"),
    ],
)
def test_bad_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SglangConfig(**fields)


def test_sampling_speaks_sglangs_language():
    fields = sampling_fields(SamplingParams(max_tokens=7, temperature=0.5, stop_token_ids=(3,)))
    assert fields["top_k"] == -1 and fields["stop_token_ids"] == [3] and not fields["ignore_eos"]
    assert fields["max_new_tokens"] == 7
    assert sampling_fields(SamplingParams())["ignore_eos"]
    with pytest.raises(ValueError, match="not proven exact|verifies greedily"):
        ngram = Strategy(drafter="ngram", num_steps=3, num_draft_tokens=4)
        check_speculation(SamplingParams(), ngram, device="cpu")
    check_speculation(SamplingParams(), CHAIN, device="cuda")
    check_speculation(SamplingParams(temperature=0), CHAIN, device="cpu")


def test_version_spans_cover_every_token():
    spans = [{"version": "2", "start": 0, "end": 3}, {"version": "5", "start": 3, "end": 4}]
    assert versions_of(spans, "5", 4) == (2, 2, 2, 5)
    assert versions_of([], "7", 2) == (7, 7)
    with pytest.raises(ValueError, match="do not cover"):
        versions_of([], None, 2)
    answer = dict(
        tokens=[1, 2], log_probs=[-1.0], versions=[], version="1", finish="stop", verify_ct=0,
        num_drafted=0, num_accepted=0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="2 tokens and 1 log-probs"):
        rollout_of(Prompt(prompt_id=1, tokens=(1,)), 0, answer)


def test_features_keep_the_rows_that_a_cached_prompt_left():
    answer = dict(
        tokens=[7, 8, 9], log_probs=[-1.0] * 3, versions=[], version="4", finish="length", verify_ct=0,
        num_drafted=0, num_accepted=0,
    )  # fmt: skip
    rollout = rollout_of(Prompt(prompt_id=1, tokens=(1, 2, 3, 4)), 0, answer)
    states = {"prompt": torch.tensor([[3.0], [4.0]]), "decoded": torch.tensor([[7.0], [8.0], [9.0]])}
    sample = feature_sample(rollout, states, context_rows=3)
    assert sample.hidden.flatten().tolist() == [3.0, 4.0, 7.0, 8.0]
    assert sample.context_tokens == (4,) and sample.tokens == (7, 8, 9) and sample.weight_version == 4
    assert feature_sample(rollout, states | {"decoded": torch.zeros(1, 1)}, context_rows=0) is None


def test_weights_are_kept_whole_or_not_at_all(tmp_path):
    model, engine = reference("llama"), make_engine()
    config = model.config.to_dict()
    store = WeightStore(tmp_path, config, engine.model.shape, None)
    pairs = dict(model.state_dict())
    first = store.put("target", pairs.items(), version=1, checksum=None, bucket_bytes=1 << 20)
    with pytest.raises(ValueError, match="were not given"):
        store.put("target", list(pairs.items())[:3], version=2, checksum=None, bucket_bytes=1 << 20)
    assert [p for p in tmp_path.iterdir() if p.name.startswith("target")] == [first]
    assert not list(tmp_path.glob(".*partial"))
    second = store.put("target", pairs.items(), version=3, checksum=None, bucket_bytes=1 << 20)
    assert not first.exists() and store.versions["target"] == 3
    assert len(list(second.glob("*.safetensors"))) == 1 and store.kinds == ["target"]


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="'sglang', 'sgl_kernel'.*sglang_environment"):
        process.check_installed("cpu")


def test_what_sglang_cannot_speculate_is_refused_before_the_run(tmp_path):
    assert RolloutConfig(rollout_batch_size=1).engine == "native"
    sglang = {"engine": "sglang"}
    assert rl_config(tmp_path, RolloutConfig=sglang, speculation="tlt").drafts
    with pytest.raises(ValueError, match="cannot be switched off"):
        rl_config(tmp_path, RolloutConfig=sglang, speculation="ngram")
    with pytest.raises(ValueError, match="without the final ones"):
        rl_config(
            tmp_path, RolloutConfig=sglang, speculation="tlt", DraftingConfig={"layout": "eagle3"}
        )
