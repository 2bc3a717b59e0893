"""Tokenize text into Megatron's .bin/.idx files.

    python tools/preprocess_data.py --input corpus/train.jsonl --output-prefix data/corpus \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model spm.model --append-eod --workers 2

Reads JSON lines and plain text (also .gz, .xz), parquet, folders and globs. Empty documents and
broken lines are left out, counted and listed; --strict makes them fatal.
"""

import argparse
import sys

from tqdm import tqdm

from megatron_tlt.data.preprocess import PreprocessConfig, PreprocessReport, preprocess
from megatron_tlt.data.tokenizer import add_tokenizer_arguments, tokenizer_config


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", nargs="+", required=True, help="files, folders or globs")
    parser.add_argument("--output-prefix", required=True)
    parser.add_argument("--json-keys", nargs="+", default=["text"])
    parser.add_argument("--append-eod", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=1000, help="documents per bar update")
    parser.add_argument("--strict", action="store_true", help="stop at the first bad line")
    add_tokenizer_arguments(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    config = PreprocessConfig(
        input=args.input,
        output_prefix=args.output_prefix,
        json_keys=args.json_keys,
        append_eod=args.append_eod,
        workers=args.workers,
        strict=args.strict,
    )
    with tqdm(unit=" documents", file=sys.stderr, miniters=args.log_interval) as bar:

        def show(report: PreprocessReport) -> None:
            bar.set_postfix_str(f"{report.megabytes_per_second():.2f} MB/s", refresh=False)
            bar.update(report.documents - bar.n)

        report = preprocess(config, tokenizer_config(vars(args)), progress=show)
    for problem in report.read.problems:
        print(problem, file=sys.stderr)
    print(
        f"{report.documents} documents, {report.tokens} tokens, {report.text_bytes / 1e6:.1f} MB "
        f"in {report.seconds:.1f} s = {report.megabytes_per_second():.2f} MB/s; skipped "
        f"{report.empty_documents} empty documents, {report.read.blank_lines} blank and "
        f"{report.read.invalid_lines} invalid lines; wrote {', '.join(report.prefixes)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
