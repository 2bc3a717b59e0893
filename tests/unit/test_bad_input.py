"""Wrong input of every kind ends in one line that names it and says what to do, before anything trains."""

import json
import pickle
import shutil
from pathlib import Path

import pytest

from megatron_tlt.config import build_parser, parse
from megatron_tlt.data.indexed import IndexedDatasetWriter
from megatron_tlt.data.tokenizer import build_tokenizer
from megatron_tlt.parallel import init_parallel
from megatron_tlt.pretrain import main
from megatron_tlt.train.config import PretrainConfig
from megatron_tlt.train.setup import build_run

import numpy as np
import torch

SMALL = [
    "--model.preset=tiny-gpt2", "--model.num_layers=2", "--training.train_iters=3",
    "--training.global_batch_size=4", "--training.eval_iters=0", "--data.mock_data=true",
    "--data.num_workers=0", "--logging.peak_tflops=1",
]  # fmt: skip
FILES = ["--data.mock_data=false", "--data.data_cache_path={files}/cache"]
TP2, PP2 = "--parallel.tensor_model_parallel_size=2", "--parallel.pipeline_model_parallel_size=2"

# name: (arguments, number of ranks, words of the message)
CONFIGURATION = {
    "unknown key": (["--model.hiden_size=3"], 1, ["model.hiden_size", "did you mean 'model.hidden_size'"]),
    "key without section": (["--lr=3"], 1, ["'lr'", "did you mean 'optimizer.lr'"]),
    "not a number": (["--training.seed=abc"], 1, ["training.seed", "abc"]),
    "not a choice": (["--optimizer.lr_decay_style=square"], 1, ["lr_decay_style", "square", "cosine"]),
    "missing file": (["--config=missing.yaml"], 1, ["missing.yaml"]),
    "unknown preset": (["--model.preset=gpt5"], 1, ["gpt5", "known:"]),
    "no layers": (["--model.num_layers=0"], 1, ["model.num_layers=0", "at least 1"]),
    "heads do not divide": (["--model.num_attention_heads=5"], 1, ["hidden_size=64", "=5", "change one"]),
    "groups do not divide": (["--model.num_query_groups=3"], 1, ["num_attention_heads=4", "=3"]),
    "odd rotary width": (
        ["--model.kv_channels=15", "--model.position_embedding_type=rope"], 1, ["even", "15"],
    ),
    "too few positions": (
        ["--model.max_position_embeddings=8"], 1, ["seq_length=64", "max_position_embeddings=8"],
    ),
    "two activations": (["--model.swiglu=true"], 1, ["openai_gelu", "swiglu=false"]),
    "dropout of one": (["--model.hidden_dropout=1.0"], 1, ["hidden_dropout=1.0", "[0, 1)"]),
    "recompute nothing known": (["--model.recompute_modules=[moe]"], 1, ["moe", "core_attn"]),
    "recompute without full": (
        ["--model.recompute_method=block"], 1, ["recompute_method", "recompute_granularity=full"],
    ),
    "context parallelism": (["--parallel.context_parallel_size=2"], 1, ["context_parallel_size", "=2"]),
    "expert parallelism": (["--parallel.expert_model_parallel_size=2"], 1, ["expert_model", "leave it at 1"]),
    "no tensor ranks": (["--parallel.tensor_model_parallel_size=0"], 1, ["size=0", "at least 1"]),
    "sequence without tensor": (["--parallel.sequence_parallel=true"], 1, ["tensor_model_parallel_size > 1"]),
    "virtual without pipeline": (
        ["--parallel.virtual_pipeline_model_parallel_size=2"], 1, ["pipeline_model_parallel_size > 1", "got 1"],
    ),
    "batched virtual pipeline": (
        [PP2, "--parallel.virtual_pipeline_model_parallel_size=2", "--parallel.batch_p2p_comm=true"], 2,
        ["batch_p2p_comm=false"],
    ),
    "no time for collectives": (
        ["--parallel.distributed_timeout_minutes=0"], 1, ["distributed_timeout_minutes=0", "above 0"],
    ),
    "ranks left over": ([TP2], 3, ["3 ranks", "multiple of 2"]),
    "more tensor ranks than heads": (
        ["--parallel.tensor_model_parallel_size=8"], 8, ["8", "num_query_groups=4", "at most 4"],
    ),
    "layers do not divide": (["--parallel.pipeline_model_parallel_size=3"], 3, ["num_layers=2", "3"]),
    "sequence does not divide": (
        [TP2, "--parallel.sequence_parallel=true", "--model.seq_length=63"], 2, ["seq_length=63", "=2"],
    ),
    "batch does not divide": (
        ["--training.micro_batch_size=3"], 1, ["batch size 4", "micro_batch_size=3", "nearest that is, is 3"],
    ),
    "no steps": (["--training.train_iters=0"], 1, ["train_iters=0", "at least 1"]),
    "no batch": (["--training.global_batch_size=0"], 1, ["global_batch_size=0", "at least 1"]),
    "negative evaluations": (["--training.eval_iters=-1"], 1, ["eval_iters=-1", "negative"]),
    "exit at no step": (["--training.exit_interval=0"], 1, ["exit_interval=0", "at least 1"]),
    "exit after no time": (["--training.exit_duration_in_mins=0"], 1, ["exit_duration_in_mins=0", "above 0"]),
    "no spike": (["--training.spike_threshold=-2"], 1, ["spike_threshold=-2", "above 0"]),
    "ramp of two numbers": (["--training.rampup_batch_size=[2,2]"], 1, ["[2, 2]", "three numbers"]),
    "ramp that misses": (["--training.rampup_batch_size=[1,2,8]"], 1, ["[1, 2, 8]", "whole increments"]),
    "negative rate": (["--optimizer.lr=-0.1"], 1, ["optimizer.lr=-0.1", "at least 0"]),
    "rate that is no number": (["--optimizer.lr=.nan"], 1, ["optimizer.lr=nan", "a number"]),
    "minimum above the rate": (["--optimizer.min_lr=1"], 1, ["min_lr=1", "[0, lr="]),
    "two warm-ups": (
        ["--optimizer.lr_warmup_iters=1", "--optimizer.lr_warmup_fraction=0.1"], 1, ["give one"],
    ),
    "warm-up fraction": (["--optimizer.lr_warmup_fraction=1.5"], 1, ["lr_warmup_fraction=1.5", "[0, 1)"]),
    "warm-up as long as the run": (["--optimizer.lr_warmup_iters=3"], 1, ["warm-up of 3", "decay of 3"]),
    "WSD without its end": (["--optimizer.lr_decay_style=WSD"], 1, ["needs optimizer.lr_wsd_decay_iters"]),
    "WSD longer than the run": (
        ["--optimizer.lr_decay_style=WSD", "--optimizer.lr_wsd_decay_iters=9"], 1, ["=9", "exceeds the 3"],
    ),
    "momentum of one": (["--optimizer.adam_beta1=1.0"], 1, ["adam_beta1=1.0", "[0, 1)"]),
    "second momentum": (["--optimizer.adam_beta2=-0.5"], 1, ["adam_beta2=-0.5", "[0, 1)"]),
    "negative clipping": (["--optimizer.clip_grad=-1"], 1, ["clip_grad=-1", "at least 0"]),
    "decay that falls": (
        ["--optimizer.start_weight_decay=0.5", "--optimizer.weight_decay_incr_style=linear"], 1,
        ["start_weight_decay=0.5", "end_weight_decay=0.1"],
    ),
    "gather without sharding": (
        ["--optimizer.overlap_param_gather=true"], 1, ["needs use_distributed_optimizer=true"],
    ),
    "interval without a folder": (["--checkpoint.save_interval=5"], 1, ["save_interval=5", "checkpoint.save"]),
    "retention without a folder": (["--checkpoint.keep_last=2"], 1, ["keep_last=2", "checkpoint.save"]),
    "asynchronous nothing": (["--checkpoint.async_save=true"], 1, ["async_save=True", "checkpoint.save"]),
    "keep none": (["--checkpoint.save=x", "--checkpoint.keep_last=0"], 1, ["keep_last=0", "at least 1"]),
    "step of nothing": (["--checkpoint.ckpt_step=3"], 1, ["ckpt_step", "needs checkpoint.load"]),
    "fine-tune nothing": (["--checkpoint.finetune=true"], 1, ["finetune", "needs checkpoint.load"]),
    "log never": (["--logging.log_interval=0"], 1, ["log_interval=0", "at least 1"]),
    "negative peak": (["--logging.peak_tflops=-1"], 1, ["peak_tflops=-1", "above 0"]),
    "no time to save": (["--timeouts.save=0"], 1, ["timeouts.save=0", "above 0 seconds"]),
    "empty profile": (
        ["--profiling.profile_step_start=5", "--profiling.profile_step_end=5"], 1, ["start=5", "end=5"],
    ),
    "memory history of a CPU": (["--profiling.record_memory_history=true"], 1, ["needs a GPU"]),
    "half an EST": (["--est.schedule=stages"], 1, ["est.stages", "needs a list of stages"]),
    "EST theta": (["--est.pld_theta=2"], 1, ["pld_theta=2", "(0, 1]"]),
    "FP8 history": (["--precision.fp8_amax_history_len=0"], 1, ["fp8_amax_history_len=0", "at least 1"]),
    "tokenizer without its file": (
        ["--tokenizer.tokenizer_type=SentencePieceTokenizer"], 1, ["needs --tokenizer-model"],
    ),
    "tokenizer file missing": (
        ["--tokenizer.tokenizer_type=SentencePieceTokenizer", "--tokenizer.tokenizer_model=no.model"], 1,
        ["no.model", "SentencePiece .model"],
    ),
    "tokenizer file damaged": (
        ["--tokenizer.tokenizer_type=SentencePieceTokenizer", "--tokenizer.tokenizer_model={files}/noise"], 1,
        ["noise", "no SentencePiece .model"],
    ),
    "tokenizer folder empty": (
        ["--tokenizer.tokenizer_type=HuggingFaceTokenizer", "--tokenizer.tokenizer_model={files}/empty"], 1,
        ["empty", "tokenizer.json"],
    ),
    "merges missing": (
        ["--tokenizer.tokenizer_type=GPT2BPETokenizer", "--tokenizer.vocab_file={files}/noise",
         "--tokenizer.merge_file=no.txt"], 1, ["no.txt", "merges.txt"],
    ),
    "null vocabulary": (
        ["--tokenizer.tokenizer_type=NullTokenizer", "--tokenizer.vocab_size=0"], 1, ["--vocab-size 0", "at least 1"],
    ),
}  # fmt: skip

# Found when the run is put together: data files, checkpoints.
BUILDING = {
    "no data": (["--data.mock_data=false"], ["exactly one of", "--mock-data"]),
    "two kinds of data": (["--data.data_path=[x]"], ["exactly one of", "--data-path", "--mock-data"]),
    "data missing": ([*FILES, "--data.train_data_path=[{files}/none]"], ["none.idx", "without .bin/.idx"]),
    "weights without paths": ([*FILES, "--data.data_path=[x,y,'1']"], ["weight prefix pairs"]),
    "weight of zero": ([*FILES, "--data.data_path=['0',x]"], ["weight above 0"]),
    "split of words": ([*FILES, "--data.data_path=[{files}/good]", "--data.split=a,b"], ["a,b", "969,30,1"]),
    "split of nothing": ([*FILES, "--data.data_path=[{files}/good]", "--data.split=0,1"], ["first share"]),
    "index cut": ([*FILES, "--data.train_data_path=[{files}/cut_index]"], ["cut_index.idx", "bytes"]),
    "index of another kind": ([*FILES, "--data.train_data_path=[{files}/other]"], ["other.idx", "not a token index"]),
    "tokens cut": ([*FILES, "--data.train_data_path=[{files}/cut_tokens]"], ["cut_tokens.bin", "truncated"]),
    "no documents": ([*FILES, "--data.train_data_path=[{files}/nothing]"], ["nothing", "tokens"]),
    "ids beyond the vocabulary": ([*FILES, "--data.train_data_path=[{files}/large]"], ["large holds ids 5000..5000", "0..256"]),
    "nothing to resume": (["--checkpoint.load={files}/empty"], ["no complete checkpoint", "leave checkpoint.load out"]),
    "step missing": (["--checkpoint.load={files}/run", "--checkpoint.ckpt_step=9"], ["ckpt_step=9", "iterations there: [2"]),
    "another model": (["--checkpoint.load={files}/run", "--model.num_layers=4"], ["num_layers: checkpoint 2, this run 4"]),
    "another tokenizer": (
        ["--checkpoint.load={files}/run", "--tokenizer.tokenizer_type=NullTokenizer", "--tokenizer.vocab_size=300"],
        ["another tokenizer", "vocab_size: checkpoint 257, this run 301"],
    ),
    "checkpoint cut": (["--checkpoint.load={files}/cut"], ["__0_0.distcp has", "its manifest says"]),
    "checkpoint that would run code": (["--checkpoint.load={files}/evil"], [".metadata is refused", "posix.mkdir"]),
    "common file that would run code": (["--checkpoint.load={files}/sly"], ["common.pt is refused", "foreign objects"]),
    "checkpoint of another format": (["--checkpoint.load={files}/zarr"], ["zarr", "torch_dist"]),
    "state of another release": (["--checkpoint.load={files}/future"], ["checkpoint format 99", "reads 1"]),
    "save into a file": (["--checkpoint.save={files}/noise"], ["checkpoint.save", "not a folder"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def parser():
    return build_parser(PretrainConfig, prog="x", description="x")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Good and damaged files of every kind."""
    files = tmp_path_factory.mktemp("files")
    (files / "noise").write_bytes(bytes(range(256)) * 4)
    (files / "empty").mkdir()
    _token_files(files)
    assert main([*SMALL, f"--checkpoint.save={files}/run", "--checkpoint.save_interval=2",
                 f"--logging.log_dir={files}/logs"]) == 0  # fmt: skip
    for name in ("cut", "evil", "sly", "zarr", "future"):
        shutil.copytree(files / "run" / "iter_0000003", files / name / "iter_0000003")
    _cut(files / "cut" / "iter_0000003" / "__0_0.distcp")
    _replace(files / "evil", ".metadata", pickle.dumps(_Evil()))
    torch.save({"x": _Evil()}, files / "sly.pt")
    _replace(files / "sly", "common.pt", (files / "sly.pt").read_bytes())
    _replace(files / "zarr", "metadata.json", b'{"sharded_backend": "zarr"}')
    state = json.loads((files / "run" / "iter_0000003" / "train_state.json").read_bytes())
    _replace(files / "future", "train_state.json", json.dumps(state | {"format_version": 99}).encode())
    return files


class _Evil:
    def __reduce__(self):
        import os

        return os.mkdir, ("was_here",)


def _replace(root, name, content):
    """Put other content into a checkpoint, with a manifest that fits it, as an attacker would."""
    from megatron_tlt.train.manifest import file_record, read_manifest, write_manifest

    folder = root / "iter_0000003"
    manifest = read_manifest(folder)
    (folder / name).write_bytes(content)
    manifest[name] = file_record(folder / name)
    write_manifest(folder, manifest, iteration=3)


def _token_files(files):
    def write(name, documents):
        with IndexedDatasetWriter(files / name, dtype=np.uint16) as writer:
            for document in documents:
                writer.add_document(document)

    text = [np.arange(200) % 250 for _ in range(20)]
    for name in ("good", "cut_index", "other", "cut_tokens"):
        write(name, text)
    write("nothing", [])
    write("large", [np.full(2000, 5000)])
    _cut(files / "cut_index.idx")
    _cut(files / "cut_tokens.bin")
    (files / "other.idx").write_bytes(b"PARQUET" * 10)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def refusal(parser, arguments, world_size=1) -> str:
    """The message with which reading and checking the input ends."""
    with pytest.raises(ValueError) as error:
        config, _ = parse(parser, PretrainConfig, [*SMALL, *arguments])
        config.check(world_size)
        build_tokenizer(config.tokenizer)
    return str(error.value)


def check(message, words):
    assert "\n" not in message, message
    assert len(message) < 600, message
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in {message!r}"


@pytest.mark.parametrize("name", CONFIGURATION)
def test_wrong_settings_are_refused_before_a_process_group_exists(name, parser, files):
    arguments, world_size, words = CONFIGURATION[name]
    arguments = [argument.replace("{files}", str(files)) for argument in arguments]
    check(refusal(parser, arguments, world_size), words)


@pytest.mark.parametrize("name", BUILDING)
def test_wrong_files_are_refused_before_the_first_step(name, parser, files, recwarn):
    arguments, words = BUILDING[name]
    arguments = [argument.replace("{files}", str(files)) for argument in arguments]
    config, _ = parse(parser, PretrainConfig, [*SMALL, *arguments])
    with pytest.raises(ValueError) as error:
        build_run(config, init_parallel(config.parallel, seed=1))
    check(str(error.value), words)
    assert not Path("was_here").exists()


def test_the_program_says_it_in_one_line_and_ends_with_code_2(files, capsys):
    for arguments in (["--optimizer.min_lr=1"], [f"--checkpoint.load={files}/empty"]):
        assert main([*SMALL, *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")


def test_the_table_is_long_enough():
    assert len(CONFIGURATION) + len(BUILDING) >= 60
