"""What SGLang is told and what it is refused, without SGLang."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_tlt import device
from megatron_tlt.models.hf_files import SafetensorsFolder
from megatron_tlt.rl.config import RolloutConfig
from megatron_tlt.rollout.checksum import weights_checksum
from megatron_tlt.rollout.sglang import answers, process
from megatron_tlt.rollout.sglang.answers import (
    check_speculation,
    feature_sample,
    rollout_of,
    sampling_fields,
    versions_of,
)
from megatron_tlt.rollout.sglang.config import SglangConfig, engine_arguments
from megatron_tlt.rollout.sglang.store import WeightStore
from megatron_tlt.rollout.sglang.transport import (
    build_transport,
    flatten,
    in_buckets,
    layout,
    shared_handle,
)
from megatron_tlt.types import Prompt, SamplingParams, Strategy
from tests.dist.rl_tasks import rl_config
from tests.unit.rollout_models import make_engine, reference

CHAIN = Strategy(drafter="eagle", num_steps=3, num_draft_tokens=4)
PLACES = dict(target=Path("models/target"), draft=Path("models/draft"))


@pytest.mark.parametrize("eagle3", [False, True])
def test_the_devices_differ_in_a_dictionary_only(eagle3):
    config = SglangConfig(strategy=CHAIN, max_model_len=512, max_total_tokens=999, dtype=torch.bfloat16)
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
        (dict(max_model_len=128, max_total_tokens=133), "needs 134 rows"),
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


def test_sampling_is_refused_where_sglang_would_verify_greedily(monkeypatch):
    ngram = Strategy(drafter="ngram", num_steps=3, num_draft_tokens=4)
    for strategy in (CHAIN, ngram):
        monkeypatch.setattr(answers, "plugin_is_installed", lambda: False)
        with pytest.raises(ValueError, match="verifies greedily"):
            check_speculation(SamplingParams(), strategy, device="cpu")
        check_speculation(SamplingParams(), strategy, device="cuda")
        check_speculation(SamplingParams(temperature=0), strategy, device="cpu")
        monkeypatch.setattr(answers, "plugin_is_installed", lambda: True)
        check_speculation(SamplingParams(), strategy, device="cpu")


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
        rollout_of(Prompt(prompt_id=1, tokens=(1,)), 0, answer, max_tokens=9)


def test_a_response_that_sglang_cut_short_is_an_error():
    answer = dict(
        tokens=[1, 2], log_probs=[-1.0] * 2, versions=[], version="1", finish="length", verify_ct=0,
        num_drafted=0, num_accepted=0,
    )  # fmt: skip
    prompt = Prompt(prompt_id=1, tokens=(1,))
    assert rollout_of(prompt, 0, answer, max_tokens=2).tokens == (1, 2)
    with pytest.raises(ValueError, match="after 2 of 9 tokens"):
        rollout_of(prompt, 0, answer, max_tokens=9)
    assert rollout_of(prompt, 0, answer | {"finish": "stop"}, max_tokens=9).tokens == (1, 2)


def test_features_keep_the_rows_that_a_cached_prompt_left():
    answer = dict(
        tokens=[7, 8, 9], log_probs=[-1.0] * 3, versions=[], version="4", finish="length", verify_ct=0,
        num_drafted=0, num_accepted=0,
    )  # fmt: skip
    rollout = rollout_of(Prompt(prompt_id=1, tokens=(1, 2, 3, 4)), 0, answer, max_tokens=3)
    states = {"prompt": torch.tensor([[3.0], [4.0]]), "decoded": torch.tensor([[7.0], [8.0], [9.0]])}
    sample = feature_sample(rollout, states, context_rows=3, feature_size=1)
    assert sample.hidden.flatten().tolist() == [3.0, 4.0, 7.0, 8.0] and sample.last_hidden is None
    assert sample.context_tokens == (4,) and sample.tokens == (7, 8, 9) and sample.weight_version == 4
    too_few = states | {"decoded": torch.zeros(1, 1)}
    assert feature_sample(rollout, too_few, context_rows=0, feature_size=1) is None
    wide = {name: torch.cat((rows, 10 * rows, rows + 1), 1) for name, rows in states.items()}
    sample = feature_sample(rollout, wide, context_rows=0, feature_size=2)
    assert sample.hidden.tolist() == [[4.0, 40.0], [7.0, 70.0], [8.0, 80.0]]
    assert sample.last_hidden.flatten().tolist() == [5.0, 8.0, 9.0]


def test_weights_are_kept_whole_or_not_at_all(tmp_path):
    model, engine = reference("llama"), make_engine()
    config = model.config.to_dict()
    store = WeightStore(tmp_path, config, engine.model.shape, None, bucket_bytes=1 << 20, in_memory=False)
    pairs = dict(model.state_dict())
    first = store.put("target", pairs.items(), version=1, checksum=None)
    with pytest.raises(ValueError, match="were not given"):
        store.put("target", list(pairs.items())[:3], version=2, checksum=None)
    assert [p for p in tmp_path.iterdir() if p.name.startswith("target")] == [first]
    assert not list(tmp_path.glob(".*partial"))
    second = store.put("target", pairs.items(), version=3, checksum=None)
    assert not first.exists() and store.versions["target"] == 3
    assert len(list(second.glob("*.safetensors"))) == 1 and store.kinds == ["target"]


def test_weights_in_memory_are_copies_and_become_a_folder_for_an_engine_that_starts(tmp_path):
    model, engine = reference("llama"), make_engine()
    store = WeightStore(
        tmp_path, model.config.to_dict(), engine.model.shape, None, bucket_bytes=1 << 20, in_memory=True
    )
    pairs = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    held = store.put("target", pairs.items(), version=1, checksum=weights_checksum(pairs.items()))
    assert not list(tmp_path.iterdir())
    for tensor in pairs.values():
        tensor.zero_()
    with pytest.raises(ValueError, match="were not given"):
        store.put("target", list(pairs.items())[:3], version=2, checksum=None)
    assert all(torch.equal(held[name], tensor) for name, tensor in model.state_dict().items())
    first = store.folder("target")
    written = SafetensorsFolder(first)
    assert all(torch.equal(written[name][...], tensor) for name, tensor in held.items())
    assert store.folder("target") == first
    store.put("target", pairs.items(), version=3, checksum=None)
    assert not first.exists() and store.versions["target"] == 3
    assert torch.equal(store.tables.pair()[0], pairs["model.embed_tokens.weight"])


def test_buckets_hold_one_type_and_bounded_bytes_and_lose_nothing():
    kinds = [torch.float32] * 5 + [torch.bfloat16] * 4
    pairs = [(f"w{i}", torch.randn(i + 1, 3).to(kind)) for i, kind in enumerate(kinds)]
    found = list(in_buckets(pairs, 80))
    assert [pair for bucket in found for pair in bucket] == pairs
    for bucket in found:
        assert len({tensor.dtype for _, tensor in bucket}) == 1
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= 80
        flat, facts, at = flatten(bucket, device="cpu"), layout(bucket), 0
        for (name, tensor), known, shape in zip(bucket, facts["names"], facts["shapes"], strict=True):
            part = flat[at : at + tensor.nbytes].view(tensor.dtype).reshape(shape)
            assert name == known and torch.equal(part, tensor)
            at += tensor.nbytes


def test_a_handle_opens_in_a_process_of_another_family_and_may_be_passed_on():
    flat = torch.arange(1000, dtype=torch.uint8)
    program = (
        "import base64, pickle, sys; from multiprocessing.reduction import ForkingPickler\n"
        "from megatron_tlt.rollout.sglang.transport import SharedTensor, named_files\n"
        "shared = SharedTensor(pickle.loads(base64.b64decode(sys.stdin.read())))\n"
        "with named_files(): passed_on = bytes(ForkingPickler.dumps(shared))\n"
        "tensor = pickle.loads(passed_on)\n"
        "print(int(tensor.long().sum())); tensor.fill_(7)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=shared_handle(flat), capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == [str(sum(i % 256 for i in range(1000)))], done.stderr
    assert set(flat.tolist()) == {7}  # the same memory, not a copy


def test_transports_that_cannot_work_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="choose folder, tensor or group"):
        SglangConfig(weight_transport="carrier pigeon")
    with pytest.raises(ValueError, match="takes the trainer's tensors themselves"):
        RolloutConfig(rollout_batch_size=1, weight_transport="tensor")
    with pytest.raises(ValueError, match="base_gpu_id"):
        build_transport(SglangConfig(weight_transport="group"), device="cuda")
    monkeypatch.setattr(device, "is_cuda", lambda: True)
    with pytest.raises(ValueError, match="NCCL refuses two processes on one GPU"):
        RolloutConfig(rollout_batch_size=1, engine="sglang", weight_transport="group")


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
