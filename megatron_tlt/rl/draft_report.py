"""What the drafter's training did in a step: one report a rank, and the metrics of all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_tlt.rollout.acceptance import Counts, accept_length, add_counts, rates

TRAINED = ("eagle", "hybrid")
"""Strategies that draft with the trained drafter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tail:
    """The end of one rollout on one rank; seconds since the epoch."""

    finished_at: float
    """Own requests were done."""
    noticed_at: float
    """That all ranks' requests were done."""
    update_s: float = 0.0
    """Of the micro-update in which that happened, its poll included; 0: none was under way."""


@dataclass(kw_only=True, slots=True)
class DraftReport:
    """Of one rank and step."""

    updates: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    """Over updates."""
    accept_sum: float = 0.0
    """Simulated accept lengths, over updates."""
    first_loss: float = 0.0
    last_loss: float = 0.0
    forced_s: float = 0.0
    """Updates without idle time (min_updates)."""
    collect_s: float = 0.0
    """Storing lessons while generating."""
    newest_version: int = -1
    """Of the lessons that were trained on."""
    tails: list[Tail] = field(default_factory=list)
    acceptance: Counts = field(default_factory=dict)
    buffer_rows: int = 0
    longest: int = 0
    """Rows of the longest lesson."""


def preemptions(reports: Sequence[DraftReport]) -> list[tuple[float, float]]:
    """(seconds from the last rank's end to a training rank's notice, that micro-update's own seconds)."""
    found = []
    for tails in zip(*(report.tails for report in reports), strict=True):
        end = max(tail.finished_at for tail in tails)
        found += [(max(t.noticed_at - end, 0.0), t.update_s) for t in tails if t.update_s > 0]
    return found


def training_metrics(reports: Sequence[DraftReport], *, settle_s: float) -> dict[str, float]:
    """`draft/...` of a step. `settle_s`: merging and publishing, which every rank waits for.

    `draft/overhead_s` is what training has added to the critical path: the longest wait for a
    micro-update in each tail, forced updates, storing lessons, merging and publishing.
    """
    updates = sum(report.updates for report in reports)
    delays = preemptions(reports)
    overhead = settle_s + max(report.forced_s for report in reports)
    overhead += max(report.collect_s for report in reports) + sum_of_longest(reports)
    metrics = {
        "draft/num_updates": updates,
        "draft/num_tokens": sum(report.tokens for report in reports),
        "draft/num_ranks_trained": sum(report.updates > 0 for report in reports),
        "draft/buffer_rows": sum(report.buffer_rows for report in reports),
        "draft/longest_lesson": max(report.longest for report in reports),
        "draft/overhead_s": overhead,
        "draft/settle_s": settle_s,
    }
    if delays:
        metrics["draft/preempt_s"] = max(delay for delay, _ in delays)
        metrics["draft/preempt_over_update"] = max(delay / update for delay, update in delays)
    trained = [report for report in reports if report.updates]
    if trained:
        metrics["draft/loss"] = sum(r.loss_sum for r in trained) / updates
        metrics["draft/loss_first"] = sum(r.first_loss for r in trained) / len(trained)
        metrics["draft/loss_last"] = sum(r.last_loss for r in trained) / len(trained)
        metrics["draft/sim_accept_length"] = sum(r.accept_sum for r in trained) / updates
    return metrics


def sum_of_longest(reports: Sequence[DraftReport]) -> float:
    """Seconds that the ranks waited for micro-updates: in each tail the longest wait."""
    total = 0.0
    for tails in zip(*(report.tails for report in reports), strict=True):
        end = max(tail.finished_at for tail in tails)
        total += max((t.noticed_at - end for t in tails if t.update_s > 0), default=0.0)
    return max(total, 0.0)


def acceptance_metrics(reports: Sequence[DraftReport]) -> dict[str, float]:
    """Tokens a verification by kind of drafter, and of the trained one the share that stays by position."""
    counts = add_counts(report.acceptance for report in reports)
    metrics = {}
    for name, drafters in (("trained", TRAINED), ("ngram", ("ngram",))):
        length = accept_length(counts, drafters)
        if length:
            metrics[f"draft/accept_length_{name}"] = length
    for position, rate in rates(counts, "eagle", "position").items():
        metrics[f"draft/accept_position_{position}"] = rate
    return metrics


def trigger_rates(reports: Sequence[DraftReport]) -> dict[str, float]:
    """What the trigger watches: by draft position and by length bucket."""
    counts = add_counts(report.acceptance for report in reports)
    return {
        f"{kind}_{index}": rate
        for kind in ("position", "bucket")
        for index, rate in rates(counts, "eagle", kind).items()
    }
