"""The report's colours, the same on the page and in the pictures."""

from collections.abc import Sequence

RUNS = ("#2f6fde", "#e07b1f", "#2a9d5c", "#c23b5a", "#7d55c7", "#0f9aa8", "#8c6d3f", "#d45fb4")
_PHASES = {
    "generate": "#4c78d0", "train_drafter": "#e2902c", "wait": "#d3d7dd", "idle": "#d3d7dd",
    "reward": "#9b6cc4", "log_probs": "#45a6a0", "update": "#3f9a54", "publish": "#c2578f",
    "save": "#8a6d4e", "evaluate": "#93abd9", "other": "#eceef1", "unaccounted": "#f6f0d8", "off": "#9aa3af",
}  # fmt: skip
# For everything else, such as the strategies of speculation.
_OTHERS = ("#d1495b", "#edae49", "#00798c", "#66a182", "#8d6a9f", "#30638e", "#c17c74", "#5f6caf", "#b5651d")


def run_color(number: int) -> str:
    return RUNS[number % len(RUNS)]


def label_colors(labels: Sequence[str]) -> list[str]:
    """One for each phase or strategy."""
    others = [label for label in labels if label not in _PHASES]
    return [_PHASES.get(x) or _OTHERS[others.index(x) % len(_OTHERS)] for x in labels]
