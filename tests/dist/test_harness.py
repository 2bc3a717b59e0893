"""lm-eval's adapter: tiny model, several layouts, against transformers one request at a time."""

import json

import pytest
import torch
from tests.dist.bridge_tasks import layout
from tests.dist.evaluation_tasks import harness_answers
from tests.dist.workers import run_distributed

transformers = pytest.importorskip("transformers")
pytest.importorskip("lm_eval")

BYTES = 257  # ids of the ByteLevelTokenizer; 256 ends a document
PAIRS = [("It was", " the best"), ("", "of times"), ("x" * 200, "yz"), ("a ", "b")]
TEXTS = ["It was the best of times, it was the worst of times", "naïve café", "x"]
SEQ_LENGTH = 32


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "llama"
    config = transformers.LlamaConfig(
        vocab_size=BYTES, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, eos_token_id=256,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def expected_answers(folder) -> tuple[list, list, str]:
    """(log-likelihoods and greedy marks of PAIRS, rolling of TEXTS, generated text), by definition."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()

    def nats(ids: list[int], count: int) -> tuple[float, bool]:
        log_probs = model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)[-count:]
        target = torch.tensor(ids[-count:])
        return float(log_probs.gather(1, target[:, None]).sum()), bool(
            (log_probs.argmax(-1) == target).all()
        )

    pairs = []
    for context, answer in PAIRS:
        if context.endswith(" "):  # lm-eval moves the blank to the answer
            context, answer = context[:-1], " " + answer
        ids = [*(context.encode() or [256]), *answer.encode()]
        pairs.append(nats(ids[-SEQ_LENGTH - 1 :], len(answer.encode())))
    rolling = []
    for text in TEXTS:
        ids = [256, *text.encode()]
        total = 0.0
        for start in range(1, len(ids), SEQ_LENGTH):
            end = min(start + SEQ_LENGTH, len(ids))
            total += nats(ids[max(0, end - SEQ_LENGTH - 1) : end], end - start)[0]
        rolling.append(total)
    ids = list(b"It was the ")
    new: list[int] = []
    while len(new) < 12:
        new.append(int(model(torch.tensor([ids + new])).logits[0, -1].argmax()))
        if new[-1] == 256:
            new.pop()
            break
    return pairs, rolling, bytes(new).decode(errors="replace")


@pytest.mark.parametrize("tp,pp", [(2, 2), (2, 1)])  # the second with DP2
def test_answers_are_those_of_transformers(model_folder, tp, pp):
    pairs, rolling, text = expected_answers(model_folder)
    results = run_distributed(harness_answers, 4, model_folder, (PAIRS, TEXTS, SEQ_LENGTH), tp, pp)
    for our_pairs, our_rolling, whole, stopped in results:
        assert [greedy for _, greedy in our_pairs] == [greedy for _, greedy in pairs]
        assert [x for x, _ in our_pairs] == pytest.approx([x for x, _ in pairs], abs=1e-3)
        assert our_rolling == pytest.approx(rolling, abs=1e-3)
        assert whole == text
        assert stopped == text[: text.index(text[3])]


def test_local_tasks_give_a_table_and_unknown_ones_are_refused(model_folder, tmp_path):
    from megatron_tlt.data.tokenizer import TokenizerConfig
    from megatron_tlt.evaluation.harness import HarnessConfig, run_tasks, table
    from megatron_tlt.parallel import ParallelConfig

    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(json.dumps({"good": "It was", "bad": "It wsa"}) for _ in range(4)))
    (tmp_path / "task.yaml").write_text(
        f"task: tiny\ndataset_path: json\ndataset_kwargs: {{data_files: {{validation: {data.name}}}}}\n"
        "output_type: multiple_choice\nvalidation_split: validation\ndoc_to_text: ''\n"
        "doc_to_target: 0\ndoc_to_choice: '{{[good, bad]}}'\nmetric_list: [{metric: acc}]\n"
    )
    options = dict(
        load=str(model_folder), parallel=ParallelConfig(), include_path=str(tmp_path),
        data_dir=str(tmp_path), tokenizer=TokenizerConfig(),
    )  # fmt: skip
    parallel = layout(1, 1)
    results = run_tasks(HarnessConfig(tasks=["tiny"], **options), parallel)
    assert results[str(model_folder)]["tiny"]["acc"] in (0.0, 1.0)  # four times the same pair
    assert "acc" in table(results)
    with pytest.raises(ValueError, match="data_dir=.*is no folder"):
        HarnessConfig(tasks=["tiny"], **(options | {"data_dir": str(data)}))
    with pytest.raises(ValueError, match="no tasks named"):
        run_tasks(HarnessConfig(tasks=["nothing"], **options), parallel)
