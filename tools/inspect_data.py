"""Show what a Megatron .bin/.idx file holds, and check it; exit code 1 when a check fails.

    python tools/inspect_data.py --data-prefix data/corpus_text_document \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model spm.model

With a tokenizer: ids outside the vocabulary, end-of-document tokens and decoded samples too.
"""

import argparse
import json
import sys

from megatron_tlt.data.inspection import inspect_dataset
from megatron_tlt.data.tokenizer import (
    add_tokenizer_arguments,
    build_tokenizer,
    tokenizer_config,
)


def show(report: dict[str, object]) -> None:
    for name, value in report.items():
        if name == "samples":
            for place, text in enumerate(value):
                print(f"document {place}: {text!r}")
        elif name != "checks":
            print(f"{name}: {value}")
    for check in report["checks"]:
        print(f"{'ok  ' if check['passed'] else 'FAIL'} {check['name']}: {check['detail']}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-prefix", required=True, help="path without .bin/.idx")
    parser.add_argument("--num-samples", type=int, default=3, help="documents to decode")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_tokenizer_arguments(parser, required=False)
    args = parser.parse_args(argv)
    tokenizer = build_tokenizer(tokenizer_config(vars(args))) if args.tokenizer_type else None
    report = inspect_dataset(args.data_prefix, tokenizer=tokenizer, num_samples=args.num_samples)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    return 0 if all(check["passed"] for check in report["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
