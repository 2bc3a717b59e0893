"""Write train/valid/test.jsonl from text that is already on this machine.

    python tools/prepare_corpus.py --source python_stdlib --output-dir corpus

Sources: python_stdlib (needs nothing), books (needs $MEGATRON_TLT_DATA), or any file or folder of
text, JSON lines or parquet. A folder that is already complete is left as it is.
"""

import argparse
import os
import sys

from megatron_tlt.data.prepare import prepare_corpus


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", required=True, help="python_stdlib, books or a path")
    parser.add_argument("--output-dir", required=True)
    args = parser.parse_args(argv)
    manifest = prepare_corpus(
        args.source, args.output_dir, data_dir=os.environ.get("MEGATRON_TLT_DATA")
    )
    for split, facts in manifest["splits"].items():
        print(f"{split}: {facts['documents']} documents, {facts['bytes'] / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
