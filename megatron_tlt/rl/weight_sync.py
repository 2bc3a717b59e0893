"""The way of weights from the trainer to the rollout engines, cut over TP x PP there and whole here.

Every rank iterates over the export in lockstep, holding one bucket of whole tensors at a time, and its engine
takes what it needs. The channel "target" carries the policy; a drafter has a channel and names of its own.
"""

import hashlib
from collections.abc import Iterable, Iterator

from megatron_tlt.models.gpt import GPT
from megatron_tlt.models.hf import Architecture
from megatron_tlt.models.hf_stream import PlanEntry, export_hf, plan_export
from megatron_tlt.parallel import Parallel
from megatron_tlt.rollout.engine import RolloutEngine

import torch
import torch.distributed as dist


class WeightSyncError(RuntimeError):
    """Engines do not hold the same weights."""


class WeightPublisher:
    """Streams the policy into this rank's engine. Example: publisher.publish(engine, version=3).

    `bucket_bytes` bounds the whole tensors held at a time; `checksum` compares, over all ranks, a SHA-256 of
    what their engines were handed (costly for large models: it reads every byte on the host).
    """

    def __init__(
        self,
        chunks: list[GPT],
        parallel: Parallel,
        *,
        architecture: Architecture,
        bucket_bytes: int,
        checksum: bool = False,
    ) -> None:
        self._chunks, self._parallel = chunks, parallel
        self._architecture, self._bucket_bytes = architecture, bucket_bytes
        self._checksum = checksum
        self._plan: list[PlanEntry] = plan_export(chunks, parallel)

    def publish(self, engine: RolloutEngine, *, version: int) -> None:
        """Load the present weights into `engine` as `version`; collective over the world.

        No rank returns before all engines have them, so no token of an old version follows. Raises
        WeightSyncError on every rank when versions or, with `checksum`, contents differ.
        """
        tensors = export_hf(
            self._chunks,
            self._parallel,
            architecture=self._architecture,
            bucket_bytes=self._bucket_bytes,
            plan=self._plan,
        )
        digest = hashlib.sha256()
        if self._checksum:
            tensors = _digested(tensors, digest)
        engine.update_weights("target", tensors, version=version)
        mine = (version, digest.hexdigest() if self._checksum else "")
        everyone: list = [None] * self._parallel.world_size
        dist.all_gather_object(everyone, mine)  # the barrier, too
        if len(set(everyone)) > 1:
            different = [rank for rank, value in enumerate(everyone) if value != everyone[0]]
            raise WeightSyncError(
                f"weights of version {version}: the engines of ranks {different} were handed something "
                f"else than that of rank 0: {sorted(set(everyone))}"
            )


def _digested(
    tensors: Iterable[tuple[str, torch.Tensor]], digest: "hashlib._Hash"
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same pairs; names and bytes go into `digest`."""
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
        yield name, tensor
