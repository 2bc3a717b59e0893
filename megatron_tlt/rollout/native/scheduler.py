"""Who runs, who waits, and who must give way when the cache is full. No forward pass happens here."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_tlt.rollout.native.cache import SlotCache
from megatron_tlt.rollout.native.request import Group, Request

# A slot that its sequence outgrows becomes so much longer; slots shrink when they could be so much shorter.
_GROW, _SHRINK, _SPARE = 1.5, 0.6, 1.25


@dataclass(slots=True)
class Admission:
    """Requests that took slots at the end of the running ones, in order."""

    requests: list[Request] = field(default_factory=list)
    prefill: list[tuple[Request, int]] = field(default_factory=list)
    """Those whose prompt (a preempted one's whole sequence) must be computed, with their slot."""
    copies: list[tuple[Request, int, int]] = field(default_factory=list)
    """(request, slot that has its prompt, its own slot)."""


class Scheduler:
    """First come, first served; the newest running requests are preempted first and come back first.

    `room`: cache rows that a step may need beyond a sequence (drafts and the token itself). `start` makes the
    next sample of a group.
    """

    def __init__(
        self, cache: SlotCache, *, room: int, start: Callable[[Group], Request]
    ) -> None:
        self.cache, self.room, self.start = cache, room, start
        self.waiting: deque[Group] = deque()
        self.preempted: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = self.arrivals = 0
        self.epoch = 0
        """Counts weight updates: a prompt's rows may be copied within one epoch only."""

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.preempted or self.running)

    def rows_of(self, request: Request) -> int:
        """Cache rows that the request may need in the next step."""
        return len(request.tokens) + self.room

    def admit(self) -> Admission:
        """Fill free slots from the queues."""
        admission = Admission()
        self._shrink()
        while (request := self._next()) is not None:
            slot = len(self.running)
            self.running.append(request)
            admission.requests.append(request)
            request.epoch = self.epoch
            source = self._sibling(request, before=slot) if request.count == 0 else None
            if source is None:
                admission.prefill.append((request, slot))
            else:
                admission.copies.append((request, source, slot))
        return admission

    def _next(self) -> Request | None:
        """The first in the queues, if a slot that is long enough is free or can be made."""
        if not (self.preempted or self.waiting):
            return None
        if self.preempted:
            need = self.rows_of(self.preempted[0])
        else:
            need = len(self.waiting[0].prompt.tokens) + self.room
        if need > self.cache.stride and self.cache.slots_of(need) > len(self.running):
            self._divide(need)
        if need > self.cache.stride or len(self.running) >= self.cache.slots:
            return None
        if self.preempted:
            return self.preempted.popleft()
        group = self.waiting[0]
        request = self.start(group)
        request.arrival = self.arrivals
        self.arrivals += 1
        if group.next_sample == group.params.n:
            self.waiting.popleft()
        return request

    def _sibling(self, request: Request, *, before: int) -> int | None:
        """A slot whose first rows are this prompt under the present weights, its logits known or coming."""
        group = request.group
        for slot, other in enumerate(self.running[:before]):
            known = group.logits is not None or other.count == 0
            if other.group is group and other.epoch == self.epoch and known:
                return slot
        return None

    def make_room(self) -> bool:
        """Before a step: slots long enough for every running request. Whether somebody was preempted."""
        need = max(map(self.rows_of, self.running))
        if need <= self.cache.stride:
            return False
        stride = min(self.cache.longest, max(need, int(self.cache.stride * _GROW)))
        before = self.preemptions
        surplus = len(self.running) - self.cache.slots_of(stride)
        if surplus > 0:
            newest = sorted(range(len(self.running)), key=lambda i: self.running[i].arrival)[-surplus:]
            gone = self.remove(sorted(newest))
            for request in sorted(gone, key=lambda r: r.arrival, reverse=True):
                request.drafted_to = 0
                self.preempted.appendleft(request)
            self.preemptions += len(gone)
        self._divide(stride)
        return self.preemptions > before

    def _shrink(self) -> None:
        """More, shorter slots where all that runs and waits next would fit into them."""
        queue = self.preempted or self.waiting
        if not queue or self.cache.stride == self.cache.shortest:
            return
        need = [self.rows_of(r) for r in self.running]
        first = self.preempted[0].tokens if self.preempted else self.waiting[0].prompt.tokens
        stride = int(max(need + [len(first) + self.room]) * _SPARE)
        stride = min(self.cache.longest, max(self.cache.shortest, stride))
        if stride <= _SHRINK * self.cache.stride:
            self._divide(stride)

    def _divide(self, stride: int) -> None:
        lengths = [len(r.tokens) - 1 if r.count else len(r.tokens) for r in self.running]
        self.cache.divide(stride, lengths=lengths)

    def remove(self, slots: list[int]) -> list[Request]:
        """Take requests out (ascending slots); the last ones move into the gaps."""
        gone = [self.running[slot] for slot in slots]
        for slot in reversed(slots):
            last = self.running.pop()
            if slot < len(self.running):
                self.running[slot] = last
                self.cache.copy(len(self.running), slot, length=len(last.tokens) - 1)
        return gone
