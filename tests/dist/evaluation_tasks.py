"""Generation and scoring as tasks for gloo workers."""

from megatron_tlt.bridge.load import load_model
from megatron_tlt.data.tokenizer import TokenizerConfig
from megatron_tlt.evaluation.decoding import DecodingConfig, generate_tokens
from megatron_tlt.evaluation.scoring import ScoringConfig, score_text
from tests.dist.bridge_tasks import layout

SCORING = dict(seq_length=32, micro_batch_size=3)


def generate(folder, prompt: list[int], options: dict, tp: int, pp: int) -> list[int]:
    parallel = layout(tp, pp)
    loaded = load_model(folder, parallel)
    config = DecodingConfig(**options)
    return list(generate_tokens(loaded.chunks, parallel, prompt, config, eos=256))


def score(folder, data_path: str, stride: int, tp: int, pp: int) -> tuple[float, int]:
    parallel = layout(tp, pp)
    loaded = load_model(folder, parallel, tokenizer=TokenizerConfig())
    config = ScoringConfig(data_path=data_path, stride=stride, **SCORING)
    result = score_text(loaded, parallel, config, load=str(folder))
    return result.bits_per_byte, result.num_tokens


def harness_answers(folder, asked: tuple, tp: int, pp: int) -> tuple[list, list, str, str]:
    """lm-eval's three questions, and the generated text again with its fourth character as the stop."""
    from lm_eval.api.instance import Instance  # optional extra

    from megatron_tlt.evaluation.harness import HarnessModel

    pairs, texts, seq_length = asked
    parallel = layout(tp, pp)
    loaded = load_model(folder, parallel, tokenizer=TokenizerConfig())
    model = HarnessModel(loaded, parallel, micro_batch_size=2, seq_length=seq_length)

    def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
        return [Instance(kind, {}, a, i) for i, a in enumerate(arguments)]

    options = {"until": [], "max_gen_toks": 12}
    (whole,) = model.generate_until(requests("generate_until", [("It was the ", options)]))
    stopping = options | {"until": [whole[3]]}
    (stopped,) = model.generate_until(requests("generate_until", [("It was the ", stopping)]))
    return (
        model.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True),
        model.loglikelihood_rolling(requests("loglikelihood_rolling", [(t,) for t in texts])),
        whole,
        stopped,
    )
