"""How large a run report is, how fast it loads and how fluid its timeline is, by number of events.

    python -m tools.bench.report [--events 1000 10000 100000] [--toy] [--output DIR]

The runs are made up: phases, decode steps and requests of a few ranks over some RL steps, with a long tail.
`load_ms` is the time from opening the file in headless Chromium until everything is drawn, `zoom_ms` the
median time to draw the timeline over a zoom from all of it to a thousandth, `frame_ms` the median distance of
frames while the wheel turns. Without Chromium these are null. `load_average` tells what else ran.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_tlt.report.__main__ import write_report
from tools.bench.common import RESULTS, command_line, write_result
from tools.browser import chromium_path, open_page

from tqdm import tqdm

_STRATEGIES = ("off", "ngram_7_1_8", "eagle_5_1_6", "eagle_4_3_10")
_SLOTS = 16
# Phases after generation, and their ends in seconds from the time at which all ranks have generated.
_PHASES = (("train_drafter", -0.1), ("wait", 0.0), ("reward", 0.05), ("log_probs", 0.2), ("update", 0.7),
           ("publish", 0.75))  # fmt: skip


def rank_events(rank: int, steps: int, decodes: int, chance: random.Random) -> Iterator[dict]:
    """One rank's events: `steps` RL steps of `decodes` decode steps and about as many requests and more."""
    clock = 0.0
    for step in range(1, steps + 1):
        began, running = clock, [clock + chance.expovariate(1 / 0.4) for _ in range(_SLOTS)]
        starts, number = [clock] * _SLOTS, 0
        for i in range(decodes):
            batch = max(1, _SLOTS - i * _SLOTS // decodes)
            strategy = _STRATEGIES[min(i * 4 // decodes, 3)]
            seconds = 0.008 + 0.001 * batch * chance.random()
            accepted = [round(batch * 0.7**k) for k in range(1, 5)] if strategy != "off" else []
            yield _event(rank, step, "generate", clock, clock + seconds, strategy=strategy, batch=batch,
                         tokens=batch + sum(accepted), drafted=batch * 5 * bool(accepted),
                         accepted_by_position=accepted)  # fmt: skip
            clock += seconds
            for slot in range(batch):
                if running[slot] <= clock:
                    name = f"prompt {step * 1000 + number // 8} sample {number % 8}"
                    yield _event(rank, step, "generate", starts[slot], clock, request=name)
                    starts[slot], number = clock, number + 1
                    running[slot] = clock + chance.expovariate(1 / 0.05)
        yield _event(rank, step, "generate", began, clock)
        tail = step * decodes * 0.02
        for phase, after in _PHASES:
            end = tail + after
            if end > clock:
                yield _event(rank, step, phase, clock, end)
                clock = end


def _event(rank: int, step: int, phase: str, start: float, end: float, **details: object) -> dict:
    return {"rank": rank, "step": step, "phase": phase, "start": start, "end": end} | details


def write_run(folder: Path, *, events: int, ranks: int = 4, steps: int = 10) -> None:
    """A made-up RL run with about as many timeline events."""
    (folder / "logs" / "timeline").mkdir(parents=True)
    # A decode step comes with nearly two requests.
    decodes = max(4, round(events / ranks / steps / 2.8))
    for rank in range(ranks):
        lines = map(json.dumps, rank_events(rank, steps, decodes, random.Random(rank)))
        (folder / "logs" / "timeline" / f"rank_{rank}.jsonl").write_text("\n".join(lines) + "\n")
    records = [
        {"kind": "train", "iteration": step, "consumed_samples": 64 * step, "rollout/raw_reward": step / 20,
         "rollout/response_len/mean": 100.0 + step, "rollout/response_len/max": 500.0 + step,
         "train/train_rollout_logprob_abs_diff": 1e-7 * step, "perf/step_time": decodes * 0.02,
         "perf/tokens_per_sec": 1000.0}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    (folder / "logs" / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def measure(events: int, chromium: str | None, picture: Path) -> dict[str, object]:
    """One row; `picture` is a screenshot of the timeline."""
    with tempfile.TemporaryDirectory() as scratch:
        write_run(Path(scratch, "run"), events=events)
        began = time.perf_counter()
        _, written = write_report([Path(scratch, "run")], Path(scratch, "report"))
        row = {
            "events": written.events, "write_s": round(time.perf_counter() - began, 2),
            "file_mib": round(written.html.stat().st_size / 2**20, 2),
            "load_ms": None, "zoom_ms": None, "frame_ms": None,
            "load_average": round(os.getloadavg()[0], 1),
        }  # fmt: skip
        return row if chromium is None else row | in_browser(written.html, chromium, picture)


def in_browser(path: Path, chromium: str, picture: Path) -> dict[str, float]:
    """Load three times; zoom in the last, and take a picture of its next to last step. Raises RuntimeError
    when the page reports an error."""
    loads = []
    for repeat in range(3):
        with open_page(path, chromium) as (page, problems, load_ms):
            loads.append(load_ms)
            if repeat == 2:
                zoom_ms = page.evaluate(_ZOOM)
                frame_ms = page.evaluate(_FRAMES)
                page.select_option("[data-filter=step]", "9")
                page.evaluate("document.querySelector('.timeline').scrollIntoView()")
                page.screenshot(path=picture)
            if problems:
                raise RuntimeError(f"the report in Chromium: {problems[:3]}")
    return {
        "load_ms": round(statistics.median(loads)), "zoom_ms": round(zoom_ms, 2),
        "frame_ms": round(frame_ms, 1),
    }  # fmt: skip


_ZOOM = """() => {
  const t = window.report.timelines[0], times = [];
  t.all();
  for (let i = 0; i < 60; i++) { t.zoom(0.89, 0.4); t.draw(); times.push(t.drawMs); }
  t.all();
  return times.sort((a, b) => a - b)[30];
}"""
_FRAMES = """() => new Promise((done) => {
  const t = window.report.timelines[0], times = [];
  let last = null;
  t.all();
  const step = (now) => {
    if (last !== null) times.push(now - last);
    last = now;
    if (times.length === 60) return done(times.sort((a, b) => a - b)[30]);
    t.canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -40, cancelable: true }));
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
})"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--toy", action="store_true", help="few events, for CI")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of report.json")
    args = parser.parse_args()
    chromium = chromium_path()
    counts = [1_000] if args.toy else args.events
    rows = [measure(count, chromium, args.output / "report.png") for count in tqdm(counts, desc="reports")]
    summary = rows[-1] | {"chromium": chromium is not None}
    print(summary)
    write_result("report", command_line("tools.bench.report"), rows, summary, folder=args.output)


if __name__ == "__main__":
    main()
