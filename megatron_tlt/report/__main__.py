"""Report of runs: `python -m megatron_tlt.report RUN_DIR [RUN_DIR ...]`.

A RUN_DIR is a run's checkpoint.save or log folder, or a folder of several runs. Into --output, by default
`report` in the first RUN_DIR, it writes report.html, which needs no network; a picture for each kind of run;
for a run with a timeline also timeline.png and trace.json (for https://ui.perfetto.dev). Prints the tables.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_tlt.files import write_json, write_text
from megatron_tlt.report.chrome_trace import write_chrome_trace
from megatron_tlt.report.page import page
from megatron_tlt.report.panels import CHARTS
from megatron_tlt.report.pictures import write_pictures
from megatron_tlt.report.run import Run, find_runs
from megatron_tlt.report.summary import as_text, rl_figures, table_of
from megatron_tlt.report.timeline import Event, lanes_of, read_timeline

from tqdm import tqdm


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a report consists of."""

    html: Path
    pictures: list[Path]
    traces: list[Path]
    events: int


def write_report(folders: Sequence[Path], output: Path) -> tuple[list[Run], Written]:
    """Read the runs of `folders` and write their report into `output`.

    Raises ValueError for a folder without a run and for a line that is no record.
    """
    runs = find_runs(folders)
    output.mkdir(parents=True, exist_ok=True)
    found = {run.name: read_timeline(run.log_dir) for run in tqdm(runs, desc="timelines", leave=False)}
    timelines: dict[str, list[Event]] = {name: events for name, events in found.items() if events}
    traces = {}
    for number, (name, events) in enumerate(timelines.items(), 1):
        traces[name] = "trace.json" if len(timelines) == 1 else f"trace-{number}.json"
        write_chrome_trace(output / traces[name], lanes_of(events))
    write_text(output / "report.html", page(runs, timelines, traces=traces))
    return runs, Written(
        html=output / "report.html", pictures=write_pictures(runs, timelines, output),
        traces=[output / name for name in traces.values()],
        events=sum(map(len, timelines.values())),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="megatron_tlt.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--output", type=Path, help="folder of the report")
    parser.add_argument(
        "--figures", type=Path, help="file for the RL runs' figures, for tools.bench.rl --merge"
    )
    args = parser.parse_args(argv)
    try:
        runs, written = write_report(args.runs, args.output or args.runs[0] / "report")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for kind in CHARTS:
        head, rows = table_of(runs, kind)
        if rows:
            print(as_text(head, rows) + "\n")
    size = written.html.stat().st_size / 2**20
    print(f"{written.html} ({size:.1f} MiB, {written.events:,} timeline events)")
    for path in [*written.pictures, *written.traces]:
        print(path)
    if args.figures is not None:
        write_json(args.figures, rl_figures(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
