"""Countdown: reach a target from given numbers by + - * /, with the whole search written out.

Prompt: "3 5 7=22?" and a line break. Response: one line a try, depth first, with what is then left after a
bar ("3+5=8|7 8"); the try that reaches the target is followed by "!" and the steps of the solution
("15+7=22!3*5=15,15+7=22"). Search traces as in Stream of Search (https://arxiv.org/abs/2404.03683), in a far
terser alphabet: digits, + - * / = | , ! ? blank and line break. Response lengths are long-tailed because
searches are. The "!" follows the result itself, so that a small model learns the comparison with the target
between two tokens; problems of two numbers, which reach their target often, teach it early.

The verifier reads the answer with a parser of its own; nothing is ever evaluated as Python. Every number must
be used exactly once.
"""

import ast
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from megatron_tlt.data.rewards import tagged_answer

ALPHABET = "0123456789+-*/=|,!? \n"
_MAX_ANSWER_CHARS = 200
_ANSWER = re.compile(r"[0-9+\-*/()=, ]+")


@dataclass(kw_only=True, slots=True)
class CountdownConfig:
    """Which problems are drawn, and how long a search may be."""

    shares: dict[int, float] = field(default_factory=lambda: {2: 0.3, 3: 0.5, 4: 0.2})
    """Share of problems with so many numbers."""
    max_number: int = 9
    """Numbers are drawn from 1 to this."""
    max_value: int = 99
    """No intermediate result, and no target, exceeds this."""
    max_trace_chars: int = 1000
    """Problems whose search came out longer are drawn again."""

    def __post_init__(self) -> None:
        if not self.shares or min(self.shares) < 2 or min(self.shares.values()) <= 0:
            raise ValueError(f"shares {self.shares} must map counts >= 2 to shares > 0")
        if not 2 <= self.max_number <= self.max_value or self.max_trace_chars < 50:
            raise ValueError(
                f"need 2 <= max_number {self.max_number} <= max_value {self.max_value} and "
                f"max_trace_chars {self.max_trace_chars} >= 50"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Example: Problem(numbers=(3, 5, 7), target=22)."""

    numbers: tuple[int, ...]
    target: int

    @property
    def prompt(self) -> str:
        return f"{' '.join(map(str, self.numbers))}={self.target}?\n"

    @property
    def label(self) -> str:
        """The facts that the reward needs, as JSON (TinyZero's keys)."""
        return json.dumps({"numbers": list(self.numbers), "target": self.target})

    @property
    def key(self) -> tuple[int, ...]:
        """The same for problems that differ in the order of their numbers only."""
        return (*sorted(self.numbers), self.target)


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One try: `text` such as "3+5=8", and the numbers that are then left, the result last."""

    text: str
    left: tuple[int, ...]


def moves(numbers: tuple[int, ...], *, max_value: int) -> list[Move]:
    """All distinct tries: larger operand first; + and * up to `max_value`, - if positive, * if both exceed
    1, / if exact and by more than 1."""
    found: dict[str, Move] = {}
    for i in range(len(numbers)):
        for j in range(i + 1, len(numbers)):
            a, b = max(numbers[i], numbers[j]), min(numbers[i], numbers[j])
            rest = numbers[:i] + numbers[i + 1 : j] + numbers[j + 1 :]
            results = [
                ("+", a + b, a + b <= max_value),
                ("-", a - b, a > b),
                ("*", a * b, b > 1 and a * b <= max_value),
                ("/", a // b, b > 1 and a % b == 0),
            ]
            for sign, value, legal in results:
                text = f"{a}{sign}{b}={value}"
                if legal and text not in found:
                    found[text] = Move(text=text, left=(*rest, value))
    return list(found.values())


def draw_problem(rng: random.Random, config: CountdownConfig) -> Problem:
    """Random numbers, combined by random moves into a target: so a solution exists (but for dead ends,
    which are drawn again)."""
    counts, shares = list(config.shares), list(config.shares.values())
    while True:
        size = rng.choices(counts, shares)[0]
        numbers = tuple(rng.randint(1, config.max_number) for _ in range(size))
        left = numbers
        while len(left) > 1 and (choices := moves(left, max_value=config.max_value)):
            left = rng.choice(choices).left
        if len(left) == 1:
            return Problem(numbers=numbers, target=left[0])


def search(problem: Problem, rng: random.Random, *, max_value: int) -> Iterator[str]:
    """Lines of a depth-first search in random order; the last one holds the answer."""

    def visit(numbers: tuple[int, ...], path: tuple[str, ...]) -> Iterator[str]:
        choices = moves(numbers, max_value=max_value)
        rng.shuffle(choices)
        for move in choices:
            steps = (*path, move.text)
            if len(move.left) > 1:
                yield f"{move.text}|{' '.join(map(str, move.left))}"
                solved = yield from visit(move.left, steps)
            else:
                solved = move.left[0] == problem.target
                yield move.text + ("!" + ",".join(steps) if solved else "")
            if solved:
                return True
        return False

    yield from visit(problem.numbers, ())


def write_trace(problem: Problem, rng: random.Random, config: CountdownConfig) -> str | None:
    """The search as text, without a line break at its end; None if it is longer than `max_trace_chars`."""
    lines, size = [], 0
    for line in search(problem, rng, max_value=config.max_value):
        lines.append(line)
        size += len(line) + 1
        if size > config.max_trace_chars + 1:
            return None
    return "\n".join(lines)


def countdown_reward(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, object],
) -> float:
    """1.0 if the answer is right, else 0.0. The answer is what follows the last "!", or the content of the
    last <answer>..</answer>. Raises ValueError for a label that is none."""
    facts = json.loads(ground_truth)
    try:
        numbers, target = tuple(int(x) for x in facts["numbers"]), int(facts["target"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"label {ground_truth!r} lacks numbers and target") from error
    answer = tagged_answer(solution_str)
    if answer is None:
        answer = solution_str.rpartition("!")[2] if "!" in solution_str else ""
    return float(is_solution(answer, numbers, target))


def is_solution(answer: str, numbers: tuple[int, ...], target: int) -> bool:
    """Whether `answer` uses each of `numbers` exactly once and ends at `target`.

    Either steps ("3*5=15,15+7=22": a result may be used once, like a number) or an expression ("3*5+7",
    also "3*5+7=22"). Integers, + - * / and parentheses only; division is exact arithmetic.
    """
    if len(answer) > _MAX_ANSWER_CHARS or not _ANSWER.fullmatch(answer):
        return False
    have = Counter(Fraction(number) for number in numbers)
    for step in answer.split(","):
        left, equals, right = step.partition("=")
        used: list[int] = []
        value = _evaluate(left, used)
        if value is None or equals and _evaluate(right, []) != value:
            return False
        have.subtract(Fraction(number) for number in used)
        if min(have.values()) < 0:
            return False
        have[value] += 1
    return +have == Counter({Fraction(target): 1})


def _evaluate(text: str, used: list[int]) -> Fraction | None:
    """Value of an arithmetic expression by a walk over its syntax tree; None for anything else.

    The numbers that stand in it are appended to `used`.
    """
    try:
        return _walk(ast.parse(text.strip(), mode="eval").body, used)
    except (SyntaxError, ZeroDivisionError):
        return None


def _walk(node: ast.expr, used: list[int]) -> Fraction:
    """Raises SyntaxError for any node but integers and + - * /."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp):
        raise SyntaxError(f"{type(node).__name__} is no arithmetic")
    left, right = _walk(node.left, used), _walk(node.right, used)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    if isinstance(node.op, ast.Div):
        return left / right
    raise SyntaxError(f"{type(node.op).__name__} is no arithmetic")
