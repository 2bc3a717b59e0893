"""Generation and scoring of tiny models under several layouts, against transformers."""

import io
import json
import math

import pytest
import torch

from megatron_tlt.evaluate import main as evaluate_main
from megatron_tlt.generate import main as generate_main
from megatron_tlt.parallel import shutdown_parallel
from tests.dist.evaluation_tasks import SCORING, generate, score
from tests.dist.workers import run_distributed

transformers = pytest.importorskip("transformers")

BYTES = 257  # ids of the ByteLevelTokenizer
TEXTS = ["It was the best of times, it was the worst of times" * 3, "naïve café — 東京", "x"]
PROMPT = list(b"It was the ")


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model_folder(request, tmp_path_factory):
    """Random and sharp enough that a greedy choice is never a tie."""
    folder = tmp_path_factory.mktemp("model") / request.param
    if request.param == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=BYTES, n_embd=64, n_layer=4, n_head=4, n_positions=128, bos_token_id=256,
            eos_token_id=256,
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            vocab_size=BYTES, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
            eos_token_id=256,
        )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference(model_folder):
    return transformers.AutoModelForCausalLM.from_pretrained(model_folder).eval()


@pytest.fixture(scope="module")
def data_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "valid.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return str(path)


def on_ranks(task, world_size: int, *args) -> list:
    """`run_distributed`, but a single rank is this process."""
    return [task(*args)] if world_size == 1 else run_distributed(task, world_size, *args)


def greedy_reference(model, count: int) -> list[int]:
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == 256:
                break
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("world_size,tp,pp", [(1, 1, 1), (4, 2, 2)])
def test_greedy_tokens_are_those_of_transformers_without_cache(
    model_folder, reference, world_size, tp, pp
):
    options = dict(max_new_tokens=24)
    got = on_ranks(generate, world_size, model_folder, PROMPT, options, tp, pp)
    assert got == [greedy_reference(reference, 24)] * world_size


def test_a_seed_draws_the_same_tokens_under_every_layout(model_folder):
    options = dict(max_new_tokens=24, temperature=1.0, top_p=0.9, top_k=50, seed=7)
    alone = generate(model_folder, PROMPT, options, 1, 1)
    cut = run_distributed(generate, 4, model_folder, PROMPT, options, 2, 2)
    assert cut == [alone] * 4
    assert generate(model_folder, PROMPT, options | dict(seed=8), 1, 1) != alone


def nats_of_reference(model, text: str, seq_length: int, stride: int) -> float:
    """The definition, token by token: the context that `cut_windows` promises, one forward each."""
    ids, total = [256, *text.encode()], 0.0
    for i in range(1, len(ids)):
        end = min(1 + (i - 1) // stride * stride + stride, len(ids))
        context = ids[max(0, end - seq_length - 1) : i]
        with torch.no_grad():
            log_probs = model(torch.tensor([context])).logits[0, -1].double().log_softmax(-1)
        total -= float(log_probs[ids[i]])
    return total


@pytest.mark.parametrize("stride", [32, 16])
def test_bits_per_byte_is_that_of_transformers_under_every_layout(
    model_folder, reference, data_path, stride
):
    nats = sum(nats_of_reference(reference, text, SCORING["seq_length"], stride) for text in TEXTS)
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    expected = nats / math.log(2) / num_bytes
    for world_size, tp, pp in ((1, 1, 1), (4, 2, 2), (4, 2, 1)):  # the last with DP2
        scores = on_ranks(score, world_size, model_folder, data_path, stride, tp, pp)
        for bits, count in scores:
            assert bits == pytest.approx(expected, abs=1e-5)
            assert count == num_bytes  # one token a byte


def test_the_command_lines_work_and_bad_input_is_one_line(model_folder, data_path, tmp_path, capsys):
    shutdown_parallel()  # the programs open and close a world of their own
    model = ["--load", str(model_folder), "--tokenizer.tokenizer_type", "ByteLevelTokenizer"]
    output = tmp_path / "scores.json"
    options = ["--compare", str(model_folder), "--output", str(output)]
    data = ["--scoring.data_path", data_path, "--scoring.seq_length", "32"]
    assert evaluate_main([*model, *data, *options]) == 0
    shown = capsys.readouterr().out
    assert "bits_per_byte" in shown and "difference" in shown
    first, second = json.loads(output.read_text())["scores"]
    assert first["bits_per_byte"] == second["bits_per_byte"] > 0
    decoding = ["--decoding.max_new_tokens", "5", "--prompt", "It was"]
    assert generate_main([*model, *decoding]) == 0
    assert capsys.readouterr().out.endswith("\n")
    assert evaluate_main([*model, "--scoring.data_path", str(tmp_path / "none.jsonl")]) == 2
    assert generate_main(["--load", str(tmp_path), "--prompt", "x"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    shutdown_parallel()


def test_prompts_from_a_file_and_from_the_terminal_give_the_same_text(
    model_folder, tmp_path, capsys, monkeypatch
):
    shutdown_parallel()
    options = ["--load", str(model_folder), "--tokenizer.tokenizer_type", "ByteLevelTokenizer"]
    options += ["--decoding.max_new_tokens", "8"]
    file = tmp_path / "prompt.txt"
    file.write_text("It was the ")
    texts = []
    for given in (["--prompt", "It was the "], ["--prompt_file", str(file)], []):
        monkeypatch.setattr("sys.stdin", io.StringIO("It was the \nIt was the \n"))
        assert generate_main([*options, *given]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""
    assert texts[2] == 2 * texts[0]  # two lines were asked, then the terminal ended
    shutdown_parallel()
