"""A fault campaign over tiny two-rank runs: kill them at random, damage their checkpoints, lose nothing.

    python -m tools.prove_durability [--kills 100] [--corruptions 50] [--jobs 1] [--seed 1] [--output DIR]

Each run trains a tiny model on two ranks to its last iteration, with a checkpoint every two iterations,
synchronous and asynchronous in turn. While it runs, one random rank gets SIGKILL or SIGTERM at a random
moment, half of the time while a save is under way; then the same command is started again. Between starts the
newest checkpoint may be damaged: one file truncated, one bit flipped, or one file deleted. Checked after
every start: the run resumed from the newest checkpoint that is whole by its checksums (`lost` counts when
not), a damaged one was skipped with its file named, and the ranks ended in time (`hung`). Checked after every
run: weights and moments are bit-equal to those of an uninterrupted run. Exit code 1 unless all of it holds.
The ranks are forked from a server that has imported everything (`tools/ranks.py`) and read the configuration.
"""

import argparse
import functools
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_tlt.config import build_parser, parse
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.pretrain import train
from megatron_tlt.train.checkpoint import iteration_folder, published_iterations
from megatron_tlt.train.config import PretrainConfig
from megatron_tlt.train.manifest import problems_in, read_manifest
from megatron_tlt.train.stop import EXIT_SAVED, StopRequests
from tools.bench.common import RESULTS, command_line, write_result
from tools.ranks import Ranks

import torch
from jsonargparse import ArgumentParser
from megatron.core.dist_checkpointing import load_plain_tensors

_ITERATIONS = 16
_ONE_AT_A_TIME = threading.Lock()
"""The parser, and this process's world of one, serve one campaign at a time."""
_SECONDS_PER_START = 300.0
_RESUMED = re.compile(r"resuming from \S*iter_(\d+)")


@dataclass(kw_only=True, slots=True)
class Tally:
    """What a campaign has counted."""

    kills: int = 0
    kills_in_saves: int = 0
    by_signal: dict[str, int] = field(default_factory=lambda: {"SIGKILL": 0, "SIGTERM": 0})
    lost: int = 0
    hung: int = 0
    runs: int = 0
    runs_bit_equal: int = 0
    corruptions: int = 0
    corruptions_detected: int = 0
    starts: int = 0
    failures: list[str] = field(default_factory=list)


def arguments(folder: Path, *, async_save: bool) -> list[str]:
    """The command line of the tiny run; the same for every start."""
    return [
        "--model.preset=tiny-llama", "--model.num_layers=2", f"--training.train_iters={_ITERATIONS}",
        "--training.global_batch_size=4", "--training.micro_batch_size=2", "--training.eval_iters=1",
        "--training.eval_interval=7", "--data.mock_data=true", "--data.num_workers=0",
        "--optimizer.lr=1e-3", "--optimizer.lr_warmup_iters=2",
        "--optimizer.use_distributed_optimizer=true", "--logging.peak_tflops=1",
        "--logging.log_interval=1", "--checkpoint.save_interval=2", "--checkpoint.keep_last=3",
        f"--checkpoint.async_save={str(async_save).lower()}",
        f"--checkpoint.save={folder}", f"--checkpoint.load={folder}",
    ]  # fmt: skip


def whole_iterations(folder: Path) -> list[int]:
    """Iterations whose checkpoint is whole by its checksums, ascending."""
    return [n for n in published_iterations(folder) if not problems_in(iteration_folder(folder, n))]


class Campaign:
    """Runs with faults; see the module's description."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        folder.mkdir()
        self._folder, self._random, self.tally = folder, random.Random(seed), Tally()
        self._references: dict[bool, dict[str, torch.Tensor]] = {}
        self._logs = 0

    def run(self, *, kills: int, corruptions: int) -> Tally:
        """Runs until both numbers are reached."""
        tally = self.tally
        while tally.kills < kills or tally.corruptions < corruptions:
            self._one_run(self._folder / f"run{tally.runs}", async_save=tally.runs % 2 == 1, kills=kills,
                          corruptions=corruptions)  # fmt: skip
            print(
                f" run {tally.runs}: kills {tally.kills} ({tally.kills_in_saves} in saves), corruptions "
                f"{tally.corruptions} (detected {tally.corruptions_detected}), lost {tally.lost}, hung "
                f"{tally.hung}, bit-equal {tally.runs_bit_equal} of {tally.runs}",
                flush=True,
            )
        return tally

    def _one_run(self, folder: Path, *, async_save: bool, kills: int, corruptions: int) -> None:
        tally, damaged, codes = self.tally, None, None
        while codes != [0, 0]:
            # After the wanted number of kills the run may finish, and so it may when it has not much left.
            fault = tally.kills < kills
            codes = self._start(folder, async_save=async_save, damaged=damaged, fault=fault)
            if len(tally.failures) > 5:
                raise SystemExit("too many failures:\n" + "\n".join(tally.failures))
            damaged = None
            whole = whole_iterations(folder) if folder.exists() else []
            if codes != [0, 0] and tally.corruptions < corruptions and len(whole) >= 2:
                damaged = self._damage(iteration_folder(folder, whole[-1]))
        tally.runs += 1
        final = read_tensors(iteration_folder(folder, _ITERATIONS))
        if async_save not in self._references:
            self._references[async_save] = self._reference(async_save)
        reference = self._references[async_save]
        equal = final.keys() == reference.keys() and all(
            torch.equal(final[name], reference[name]) for name in reference
        )
        tally.runs_bit_equal += equal
        if not equal:
            tally.failures.append(f"{folder}: the final tensors are not the uninterrupted run's")
        shutil.rmtree(folder)

    def _reference(self, async_save: bool) -> dict[str, torch.Tensor]:
        folder = self._folder / f"reference{int(async_save)}"
        ranks = self._ranks(folder, async_save, self._folder / "reference.log")
        assert ranks.wait(_SECONDS_PER_START) == [0, 0], "the uninterrupted run failed"
        return read_tensors(iteration_folder(folder, _ITERATIONS))

    def _ranks(self, folder: Path, async_save: bool, log: Path) -> Ranks:
        with _ONE_AT_A_TIME:
            options = arguments(folder, async_save=async_save)
            config, _ = parse(_parser(), PretrainConfig, options)
        return Ranks(_rank, (config,), world_size=2, log=log)

    def _start(self, folder: Path, *, async_save: bool, damaged: Path | None, fault: bool) -> list[int]:
        tally = self.tally
        log = self._folder / f"start{tally.starts}.log"
        tally.starts += 1
        expected = (whole_iterations(folder) or [0])[-1] if folder.exists() else 0
        ranks = self._ranks(folder, async_save, log)
        if damaged is not None:  # the fault comes after the search for a checkpoint
            _wait(ranks, lambda: _tells_damage(log, damaged))
        sent = self._send_fault(ranks, folder, log) if fault else None
        codes = ranks.wait(_SECONDS_PER_START)
        text = log.read_text(errors="replace") if log.exists() else ""
        if codes is None:
            tally.hung += 1
            tally.failures.append(f"{log}: not over after {_SECONDS_PER_START} s")
            return []
        self._check_codes(codes, sent, log)
        found = _RESUMED.search(text)
        began = found is not None or "iteration " in text
        if began and (int(found[1]) if found else 0) != expected:
            tally.lost += 1
            resumed = found[1] if found else "nothing"
            tally.failures.append(f"{log}: resumed from {resumed}, whole was {expected}")
        if damaged is not None and _tells_damage(log, damaged):
            tally.corruptions_detected += 1
        elif damaged is not None:
            tally.failures.append(f"{log}: does not tell the damage of {damaged}:\n{text[-1500:]}")
        return codes

    def _check_codes(self, codes: list[int], sent: signal.Signals | None, log: Path) -> None:
        """SIGTERM must end in order, unless it comes before its handler; of a kill anything may come."""
        in_order = ([0, 0], [EXIT_SAVED, EXIT_SAVED])
        if sent is None and codes != [0, 0]:
            tail = log.read_text(errors="replace")[-1500:]
            self.tally.failures.append(f"{log}: exit codes {codes} although untouched:\n{tail}")
        early = -signal.SIGTERM in codes
        if sent == signal.SIGTERM and codes not in in_order and not early:
            self.tally.failures.append(f"{log}: exit codes {codes} after SIGTERM")

    def _send_fault(self, ranks: Ranks, folder: Path, log: Path) -> signal.Signals | None:
        """Kill one rank at a random moment: while the ranks start, after some steps, or in a save."""
        chance, moment = self._random, self._random.choice(["start", "step", "save", "save"])
        if moment == "start":
            _wait(ranks, lambda: False, seconds=chance.uniform(0.0, 2.0))
        else:
            steps = chance.randrange(1, 7)
            _wait(ranks, lambda: log.exists() and log.read_bytes().count(b"] iteration ") >= steps)
        if moment == "step":
            time.sleep(chance.uniform(0.0, 0.1))
        elif moment == "save":
            _wait(ranks, lambda: any(folder.glob(".iter_*.partial")))
            time.sleep(chance.uniform(0.0, 0.05))
        if not ranks.running():
            return None
        number = chance.choice([signal.SIGKILL, signal.SIGTERM])
        saving = folder.exists() and any(folder.glob(".iter_*.partial"))
        ranks.send(chance.randrange(2), number)
        if number == signal.SIGTERM and chance.random() < 0.5:
            ranks.send(chance.randrange(2), number)  # a second signal harms nothing
        self.tally.kills += 1
        self.tally.kills_in_saves += saving
        self.tally.by_signal[number.name] += 1
        return number

    def _damage(self, folder: Path) -> Path:
        """Truncate, flip or delete one file of a checkpoint; returns the file."""
        chance = self._random
        name = chance.choice([*read_manifest(folder), "manifest.json"])
        path, how = folder / name, chance.choice(["truncate", "flip", "delete"])
        size = path.stat().st_size
        if how == "delete":
            path.unlink()
        elif how == "truncate":
            with open(path, "r+b") as stream:
                stream.truncate(chance.randrange(size))
        else:
            place = chance.randrange(size)
            with open(path, "r+b") as stream:
                stream.seek(place)
                byte = stream.read(1)[0] ^ (1 << chance.randrange(8))
                stream.seek(place)
                stream.write(bytes([byte]))
        self.tally.corruptions += 1
        return path


def _wait(ranks: Ranks, until: Callable[[], bool], *, seconds: float = _SECONDS_PER_START) -> None:
    """Return when `until` holds, a rank has ended or time is up."""
    deadline = time.monotonic() + seconds
    while ranks.running() and not until() and time.monotonic() < deadline:
        time.sleep(0.004)


def _tells_damage(log: Path, damaged: Path) -> bool:
    """Whether a start has said which checkpoint it does not take, and for which file."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    words = f"{damaged.parent.name} is not resumed from"
    return any(words in line and damaged.name in line for line in lines)


def _rank(config: PretrainConfig) -> int:
    return train(config, StopRequests())


@functools.cache
def _parser() -> ArgumentParser:
    return build_parser(PretrainConfig, prog="megatron_tlt.pretrain", description="")


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, in this process as a world of one."""
    with _ONE_AT_A_TIME:
        init_parallel(ParallelConfig(), seed=1)
        return load_plain_tensors(str(folder))


def merged(tallies: list[Tally]) -> Tally:
    """The sum of what several campaigns have counted."""
    total = Tally()
    for tally in tallies:
        for name, value in asdict(tally).items():
            if name == "by_signal":
                total.by_signal = {n: total.by_signal[n] + value[n] for n in value}
            else:
                setattr(total, name, getattr(total, name) + value)
    return total


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--corruptions", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=1, help="campaigns side by side")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of durability.json")
    args = parser.parse_args(argv)
    began = time.monotonic()
    share = {"kills": -(-args.kills // args.jobs), "corruptions": -(-args.corruptions // args.jobs)}
    with tempfile.TemporaryDirectory(prefix="durability_") as folder:
        campaigns = [Campaign(Path(folder, str(job)), seed=args.seed + job) for job in range(args.jobs)]
        with ThreadPoolExecutor(args.jobs) as threads:
            tally = merged(list(threads.map(lambda campaign: campaign.run(**share), campaigns)))
    summary = {
        "kills": tally.kills,
        "lost": tally.lost,
        "hung": tally.hung,
        "bit_equal": tally.runs_bit_equal == tally.runs,
        "corruptions": tally.corruptions,
        "corruptions_detected": tally.corruptions_detected,
    }
    rows = [
        {
            "runs": tally.runs, "starts": tally.starts, "kills_in_saves": tally.kills_in_saves,
            "kills_by_signal": tally.by_signal, "failures": tally.failures,
            "iterations_per_run": _ITERATIONS, "seconds": round(time.monotonic() - began, 1),
        }
    ]  # fmt: skip
    command = command_line("tools.prove_durability")
    path = write_result("durability", command, rows, summary, folder=args.output)
    print(f"{summary}\n{path}")
    for failure in tally.failures:
        print(f"FAIL {failure}", file=sys.stderr)
    good = not tally.failures and summary["bit_equal"]
    return 0 if good and tally.corruptions_detected == tally.corruptions else 1


if __name__ == "__main__":
    sys.exit(main())
