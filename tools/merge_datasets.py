"""Merge Megatron .bin/.idx files into one.

    python tools/merge_datasets.py --input shards/ --output-prefix data/all_text_document

Refuses files whose token types or tokenizers differ.
"""

import argparse
import sys

from megatron_tlt.data.merge import find_prefixes, merge_datasets


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", nargs="+", required=True, help="a folder, or prefixes in order")
    parser.add_argument("--output-prefix", required=True)
    args = parser.parse_args(argv)
    prefixes = find_prefixes(args.input)
    documents, tokens = merge_datasets(prefixes, args.output_prefix)
    print(f"{len(prefixes)} files, {documents} documents, {tokens} tokens -> {args.output_prefix}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
