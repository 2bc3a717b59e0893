"""Train a SentencePiece BPE tokenizer (byte fallback, split digits, text kept exactly).

    python tools/train_tokenizer.py --input corpus/train.jsonl --vocab-size 8192 --output-prefix spm

Writes <output-prefix>.model. Special ids: 0 <unk>, 1 <s>, 2 <|endoftext|> (end of document and
eos), 3 <pad>; none of them is ever made from text.
"""

import argparse
import sys

from megatron_tlt.data.tokenizer_training import train_sentencepiece


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", nargs="+", required=True, help="files, folders or globs")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--output-prefix", required=True)
    parser.add_argument("--json-key", default="text")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--max-bytes", type=int, help="use only the first bytes of text")
    args = parser.parse_args(argv)
    path = train_sentencepiece(
        args.input,
        args.output_prefix,
        vocab_size=args.vocab_size,
        key=args.json_key,
        num_threads=args.num_threads,
        max_bytes=args.max_bytes,
    )
    print(f"wrote {path} ({args.vocab_size} pieces)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
