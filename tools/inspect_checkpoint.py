"""List the checkpoints of a folder and verify their files; exit code 1 when none is whole, 2 for bad input.

    python tools/inspect_checkpoint.py --load runs/quickstart/checkpoint [--no-checksums] [--tensors] [--json]

`--load` is the folder of a run or one iter_* folder in it. The newest whole one, marked `<-`, is what a
resume takes. Nothing in the folder is executed: the index is read with the classes of an index only.
"""

import argparse
import json
import sys
from pathlib import Path

from megatron_tlt.mcore_reader import read_index
from megatron_tlt.train.checkpoint import (
    TRACKER,
    iteration_folder,
    published_iterations,
    read_train_state,
)
from megatron_tlt.train.manifest import problems_in, read_manifest


def inspect_folder(folder: Path, *, checksum: bool) -> dict[str, object]:
    """What one checkpoint holds and what is wrong with it."""
    problems = problems_in(folder, checksum=checksum)
    report: dict[str, object] = {"folder": str(folder), "complete": not problems, "problems": problems}
    if problems:
        return report
    try:
        state = read_train_state(folder)
        sizes = read_index(folder).state_dict_metadata
    except ValueError as error:
        return report | {"complete": False, "problems": [str(error)]}
    return report | {
        "iteration": state.iteration,
        "consumed_train_samples": state.consumed_train_samples,
        "consumed_train_tokens": state.consumed_train_tokens,
        "optimizer": state.optimizer_step > 0,
        "bytes": sum(record.bytes for record in read_manifest(folder).values()),
        "model": state.model,
        "tensors": {name: [*entry.size] for name, entry in sizes.items() if hasattr(entry, "size")},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", required=True, type=Path, help="folder of a run, or an iter_* folder")
    parser.add_argument("--no-checksums", action="store_true", help="compare sizes only")
    parser.add_argument("--tensors", action="store_true", help="list the tensors of each checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    iterations = published_iterations(args.load)
    folders = [iteration_folder(args.load, n) for n in iterations] or [args.load]
    if not iterations and not args.load.name.startswith("iter_"):
        print(f"error: {args.load} holds no iter_* folder", file=sys.stderr)
        return 2
    reports = [inspect_folder(folder, checksum=not args.no_checksums) for folder in folders]
    tracker = args.load / TRACKER
    tracked = tracker.read_text(encoding="utf-8").strip() if tracker.is_file() else None
    if args.json:
        print(json.dumps({"tracker": tracked, "checkpoints": reports}, indent=1))
    else:
        show(reports, tracked, tensors=args.tensors)
    return 0 if any(report["complete"] for report in reports) else 1


def show(reports: list[dict], tracked: str | None, *, tensors: bool) -> None:
    resumed = next((r for r in reversed(reports) if r["complete"]), None)
    for report in reports:
        if not report["complete"]:
            print(f"DAMAGED {report['folder']}")
            for problem in report["problems"]:
                print(f"        {problem}")
            continue
        mark = " <-" if report is resumed else ""
        print(
            f"ok      {report['folder']}: iteration {report['iteration']}, "
            f"{report['consumed_train_samples']} samples, {report['bytes'] / 2**20:.1f} MiB, "
            f"{'with' if report['optimizer'] else 'without'} optimizer state{mark}"
        )
        if tensors:
            for name, shape in sorted(report["tensors"].items()):
                print(f"        {name} {shape}")
    print(f"tracker: {tracked or 'none'}")


if __name__ == "__main__":
    sys.exit(main())
