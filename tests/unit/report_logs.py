"""Logs of made-up runs for the tests of the report."""

import json
from pathlib import Path


def write_log(folder: Path, records: list[dict]) -> Path:
    """A run folder with these metrics."""
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def pretrain_records(*, est: bool = False) -> list[dict]:
    """Two records of ten steps each: 2 s and 1 s a step, 1 and 3 TFLOP/s on each of two ranks."""
    records = []
    for number, (seconds, tflops) in enumerate(((2.0, 1.0), (1.0, 3.0))):
        record = {
            "kind": "train", "iteration": 10 * (number + 1), "lm loss": 5.0 - number,
            "consumed-tokens": 1000 * (number + 1), "iteration-time": seconds, "throughput": tflops,
            "world-size": 2, "tokens-per-second": 100.0, "mfu": 0.5,
        }  # fmt: skip
        if est:
            record |= {"est-stage": number, "est-stage-end": (15, 20)[number], "est-layers": 0.5 + 0.5 * number}
        records.append(record)
    records.insert(1, {"kind": "validation", "iteration": 5, "lm loss validation": 6.0})
    records.append({"kind": "validation", "iteration": 20, "lm loss validation": 4.5})
    return records


def rl_records() -> list[dict]:
    """Two steps of 10 s and 20 s at 5 tokens/s, evaluated before and after."""
    train = [
        {"kind": "train", "iteration": n, "rollout/raw_reward": 0.1 * n, "rollout/response_len/mean": 9.0,
         "rollout/response_len/p90": 20.0, "perf/step_time": 10.0 * n, "perf/tokens_per_sec": 5.0,
         "train/train_rollout_logprob_abs_diff": 1e-7, "train/train_rollout_logprob_abs_diff_max": n * 1e-6}
        for n in (1, 2)
    ]  # fmt: skip
    evaluations = [
        {"kind": "eval", "iteration": n, "eval/task-pass@1": p, "eval/task-pass@2": p + 0.1}
        for n, p in ((0, 0.25), (2, 0.5))
    ]
    return [evaluations[0], *train, evaluations[1]]


def timeline_events() -> list[dict]:
    """Two ranks, one step: rank 0 generates 4 s; rank 1 generates 1 s, trains the drafter 2 s, waits 1 s."""

    def event(rank: int, phase: str, start: float, end: float, **details: object) -> dict:
        return {"rank": rank, "step": 1, "phase": phase, "start": start, "end": end} | details

    return [
        event(0, "generate", 100.0, 104.0),
        event(1, "generate", 100.0, 101.0),
        event(1, "train_drafter", 101.0, 103.0, updates=7),
        event(1, "wait", 103.0, 104.0),
        event(0, "generate", 100.0, 101.5, strategy="ngram_2_1_3", batch=4, tokens=9, drafted=8,
              accepted_by_position=[3, 2]),
        event(0, "generate", 101.5, 103.5, strategy="ngram_2_1_3", batch=2, tokens=3, drafted=4,
              accepted_by_position=[1]),
        event(0, "generate", 103.5, 104.0, strategy="off", batch=1, tokens=1, drafted=0),
        event(0, "generate", 100.0, 102.0, request="prompt 1 sample 0"),
        event(0, "generate", 100.0, 101.0, request="prompt 1 sample 1"),
        event(0, "generate", 101.0, 104.0, request="prompt 2 sample 0"),
    ]  # fmt: skip


def write_timeline(run: Path, events: list[dict]) -> None:
    """One file a rank."""
    folder = run / "logs" / "timeline"
    folder.mkdir()
    for rank in {event["rank"] for event in events}:
        mine = [json.dumps(event) + "\n" for event in events if event["rank"] == rank]
        (folder / f"rank{rank:05d}.jsonl").write_text("".join(mine))
