"""The command-line tools around the engine, on a tiny model folder: warm-up, proof, trace and replay."""

import json
import sys

import pytest
import tokenizers
import torch
import transformers

from megatron_tlt.draft.trainer import DrafterTrainerConfig
from megatron_tlt.models.drafter import DrafterConfig
from megatron_tlt.types import FeatureSample
from tests.unit.rollout_models import VOCAB, make_drafter, reference
from tools import prove_lossless, replay_rollout, train_drafter
from tools.bench.tlt import deepen
from tools.native_engine import config_of, prompts_of, weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("tools")
    reference("llama").save_pretrained(root / "model")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(root / "model")
    lines = [{"prompt": f"w{i} w{i + 7} w{2 * i}"} for i in range(12)]
    lines.append({"tokens": list(range(1, 40))})
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return root


def _run(monkeypatch, tool, *arguments):
    monkeypatch.setattr(sys, "argv", ["tool", *map(str, arguments)])
    return tool.main()


@pytest.fixture(scope="module")
def drafter(folder):
    with pytest.MonkeyPatch.context() as patch:
        _run(
            patch, train_drafter, "--model", folder / "model", "--prompts", folder / "prompts.jsonl",
            "--output", folder / "drafter", "--max-tokens", 24, "--max-prompt-tokens", 16,
            "--iterations", 6, "--rows", 64, "--temperature", 0,
        )  # fmt: skip
    return folder / "drafter"


def test_a_warmed_up_drafter_is_a_loadable_folder(folder, drafter):
    target = config_of(folder / "model")
    assert DrafterConfig.from_hf(config_of(drafter)) == DrafterConfig.for_target(target)
    tensors = dict(weights(drafter))
    assert tensors["fc.weight"].shape == (32, 64) and torch.isfinite(tensors["fc.weight"]).all()
    assert not any("embed" in name or "lm_head" in name for name in tensors)


def test_the_proof_passes_with_a_drafter(folder, drafter, monkeypatch, capsys):
    code = _run(
        monkeypatch, prove_lossless, "--model", folder / "model", "--drafter", drafter,
        "--prompt", "w3 w9 w27", "--prompt", "w5", "--n", 3, "--max-tokens", 30,
    )  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0 and out.rstrip().endswith("lossless")
    assert "eagle_4_4_16" in out and "mixed, small cache" in out


def test_a_recorded_trace_replays_under_every_policy(folder, drafter, monkeypatch, capsys):
    _run(
        monkeypatch, replay_rollout, "record", "--model", folder / "model", "--drafter", drafter,
        "--prompts", folder / "prompts.jsonl", "--output", folder / "trace", "--num-prompts", 4,
        "--n", 2, "--max-tokens", 20, "--max-prompt-tokens", 16, "--max-batch", 4,
    )  # fmt: skip
    capsys.readouterr()
    arguments = ("--trace", folder / "trace", "--max-batch", 4, "--ranks", 2, "--sharing", "queue")
    _run(monkeypatch, replay_rollout, "simulate", *arguments)
    lines = capsys.readouterr().out.splitlines()
    names = {line.split(":")[0].strip() for line in lines}
    assert {"off", "eagle_3_1_4", "threshold", "bandit", "contextual", "oracle"} <= names
    seconds = {line.split(":")[0].strip(): float(line.split(":")[1].split()[0]) for line in lines}
    assert all(value > 0 for value in seconds.values())


def test_prompts_are_cut_by_length_and_number(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    path = folder / "prompts.jsonl"
    assert len(prompts_of(path, tokenizer, limit=5, max_tokens=10)) == 5
    assert prompts_of(path, tokenizer, limit=50, max_tokens=10)[1].tokens == (1, 8, 2)
    assert len(prompts_of(path, tokenizer, limit=50, max_tokens=10)) == 12
    with pytest.raises(ValueError, match="no prompt"):
        prompts_of(path, tokenizer, limit=5, max_tokens=2)


def test_a_stopped_warm_up_goes_on_to_the_same_drafter(tmp_path):
    def run(iterations: int, state=None):
        drafter = make_drafter()
        generator = torch.Generator().manual_seed(4)
        samples = [
            FeatureSample(
                prompt_id=i, sample_index=0, tokens=tuple(range(12)), weight_version=0,
                hidden=torch.randn(12, 32, generator=generator),
            )
            for i in range(20)
        ]  # fmt: skip
        settings = DrafterTrainerConfig(lr=1e-3)
        train_drafter.train(
            drafter, samples, settings, iterations=iterations, rows=40, num_steps=2, state=state
        )
        return drafter.state_dict()

    whole = run(130)
    run(100, tmp_path / "state")
    halves = run(130, tmp_path / "state")
    assert all(torch.equal(whole[name], halves[name]) for name in whole)


def test_a_deepened_model_is_the_same_function(folder, tmp_path):
    deepen(folder / "model", tmp_path / "deep", times=3)
    deep = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "deep").eval()
    assert deep.config.num_hidden_layers == 9
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            deep(tokens).logits, reference("llama")(tokens).logits, atol=1e-5, rtol=1e-5
        )
