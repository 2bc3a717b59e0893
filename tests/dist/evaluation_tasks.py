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
