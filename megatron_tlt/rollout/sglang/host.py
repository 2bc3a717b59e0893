"""The program that holds `sglang.Engine`: `python -m megatron_tlt.rollout.sglang.host FD`, FD a pipe's end.

A process of its own, because the engine takes over signals, the event loop and every child of the process it
lives in, and ends that process when one of its own fails. Messages are JSON; how weights come:
transport.py. When the other end of the pipe closes, the engine and this process end.
"""

import asyncio
import json
import math
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import sglang
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sglang.srt.managers import io_struct
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

from megatron_tlt.rollout.checksum import Checksum
from megatron_tlt.rollout.sglang.transport import (
    SharedTensor,
    flatten,
    in_buckets,
    layout,
    named_files,
    shared_handle,
)


class WeightUpdateError(RuntimeError):
    """SGLang answered that an update did not succeed. It raises nothing itself."""


class Host:
    """Answers the trainer's messages on the engine's event loop."""

    def __init__(self, engine: "sglang.Engine", pipe: Connection, *, tp_size: int) -> None:
        self.engine, self.pipe, self.tp_size = engine, pipe, tp_size
        self.manager, self.loop = engine.tokenizer_manager, engine.loop
        self.tasks: set[asyncio.Task] = set()
        self.operations = {
            "generate": self.generate, "pause": self.pause, "resume": self.resume, "abort": self.abort,
            "update": self.update, "checksum": self.checksum, "info": self.info, "memory": self.memory,
            "begin_update": self.begin_update, "load": self.load, "join": self.join,
            "receive": self.receive, "end_update": self.end_update,
        }  # fmt: skip

    def serve(self) -> None:
        """Until the pipe closes."""
        threading.Thread(target=self._read, daemon=True).start()
        self.loop.run_forever()

    def _read(self) -> None:
        while True:
            try:
                message = json.loads(self.pipe.recv_bytes())
            except (EOFError, ConnectionResetError):  # reset: it went with answers still unread
                self.loop.call_soon_threadsafe(self.loop.stop)
                return
            self.loop.call_soon_threadsafe(self._start, message)

    def _start(self, message: dict[str, Any]) -> None:
        number, op = message.pop("id"), message.pop("op")
        task = self.loop.create_task(self.operations[op](**message))
        self.tasks.add(task)
        task.add_done_callback(lambda done: self._answer(number, op, done))

    def _answer(self, number: int, op: str, task: asyncio.Task) -> None:
        self.tasks.discard(task)
        error = task.exception()
        outcome = {"error": f"{op}: {error!r}"} if error else {"value": task.result()}
        answer = {"id": number} | outcome
        self.pipe.send_bytes(json.dumps(answer).encode())

    async def generate(
        self, rid: str, input_ids: list[int], sampling_params: dict[str, Any], hidden: str | None
    ) -> dict[str, Any]:
        """One response. `hidden`: the file for its hidden states."""
        request = io_struct.GenerateReqInput(
            rid=rid, input_ids=input_ids, sampling_params=sampling_params, return_logprob=True,
            return_hidden_states=hidden is not None,
        )  # fmt: skip
        output: dict[str, Any] = {}
        async for part in self.manager.generate_request(request, None):
            output = part
        meta = output["meta_info"]
        if hidden is not None and meta.get("hidden_states"):
            _save_states(meta["hidden_states"], hidden)
        return {
            "tokens": output.get("output_ids", []),
            "log_probs": [entry[0] for entry in meta.get("output_token_logprobs") or []],
            "versions": meta.get("weight_versions") or [],
            "version": meta.get("weight_version"),
            "finish": meta["finish_reason"]["type"],
            "verify_ct": meta.get("spec_verify_ct", 0),
            "num_drafted": meta.get("spec_num_proposed_drafts", 0),
            "num_accepted": meta.get("spec_num_correct_drafts", 0),
            "retractions": meta.get("num_retractions", 0),
            "cached": meta.get("cached_tokens", 0),
        }

    async def pause(self) -> None:
        """Stop decoding; requests go back to the queue with the tokens they have."""
        await self.manager.pause_generation(io_struct.PauseGenerationReqInput(mode="retract"))

    async def resume(self) -> None:
        await self.manager.continue_generation(io_struct.ContinueGenerationReqInput())

    async def abort(self, rids: list[str]) -> None:
        """Each of these requests answers for itself, with what it has."""
        for rid in rids:
            self.manager.abort_request(rid=rid)

    async def update(
        self, selector: str, folder: str, version: str | None, bucket_bytes: int, paused: bool
    ) -> None:
        """Load the folder's tensors."""
        await self.begin_update(selector, paused)
        for pairs in in_buckets(tensors_of(Path(folder)), bucket_bytes):
            flat = flatten(pairs, device="cpu")
            await self.load(selector, version, shared_handle(flat), **layout(pairs))
        await self.end_update(paused)

    async def begin_update(self, selector: str, paused: bool) -> None:
        """Requests under way are retracted and go on under the new weights."""
        if not paused:
            await self.pause()
        _check(
            await self.manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(selector=selector))
        )

    async def end_update(self, paused: bool) -> None:
        _check(await self.manager.end_weight_update(io_struct.EndWeightUpdateReqInput()))
        if not paused:
            await self.resume()

    async def load(
        self, selector: str, version: str | None, handle: str, names: list[str], dtypes: list[str],
        shapes: list[list[int]],
    ) -> None:  # fmt: skip
        """A bucket that lies in memory of another process, under `handle`."""
        shared = SharedTensor(MultiprocessingSerializer.deserialize(handle))
        content = {"flattened_tensor": shared, "metadata": metadata(names, dtypes, shapes)}
        with named_files():
            serialized = [MultiprocessingSerializer.serialize(content) for _ in range(self.tp_size)]
        request = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=serialized, load_format="flattened_bucket", selector=selector,
            weight_version=version,
        )  # fmt: skip
        _check(await self.manager.update_weights_from_tensor(request, None))

    async def join(self, address: str, port: int, world_size: int, name: str, backend: str) -> None:
        """Join a process group whose rank 0 is the trainer's."""
        request = io_struct.InitWeightsUpdateGroupReqInput(
            master_address=address, master_port=port, rank_offset=1, world_size=world_size,
            group_name=name, backend=backend,
        )  # fmt: skip
        _check(await self.manager.init_weights_update_group(request))

    async def receive(
        self, selector: str, version: str | None, group: str, names: list[str], dtypes: list[str],
        shapes: list[list[int]],
    ) -> None:  # fmt: skip
        """A bucket that the trainer broadcasts."""
        request = io_struct.UpdateWeightsFromDistributedReqInput(
            names=names, dtypes=dtypes, shapes=shapes, group_name=group, selector=selector,
            weight_version=version, load_format="flattened_bucket",
        )  # fmt: skip
        _check(await self.manager.update_weights_from_distributed(request))

    async def checksum(self, shapes: dict[str, list[int]], dtype: str) -> str:
        """Of the target's weights as the engine holds them, read back by name (slow: for small models).

        `shapes`: what was published; the engine pads vocabularies and, on a CPU, widths of MLPs.
        """
        total = Checksum()
        for name, shape in shapes.items():
            request = io_struct.GetWeightsByNameReqInput(name=name, truncate_size=shape[0])
            values = await self.manager.get_weights_by_name(request, None)
            tensor = torch.tensor(values, dtype=getattr(torch, dtype))
            total.add(name, tensor[tuple(slice(size) for size in shape)])
        return total.value()

    async def memory(self, resume: bool) -> None:
        """Give the KV cache's memory back, or take it again (nothing happens without the memory saver).

        The weights stay where they are: they are published to while the cache is away.
        """
        if resume:
            request = io_struct.ResumeMemoryOccupationReqInput(tags=["kv_cache"])
            await self.manager.resume_memory_occupation(request, None)
        else:
            request = io_struct.ReleaseMemoryOccupationReqInput(tags=["kv_cache"])
            await self.manager.release_memory_occupation(request, None)

    async def info(self) -> dict[str, Any]:
        """Version and processes: also the health check."""
        await self.manager.get_internal_state()
        return {"version": sglang.__version__, "pids": self.engine.get_all_child_pids()}


def _check(outcome: tuple[bool, str]) -> None:
    success, message = outcome
    if not success:
        raise WeightUpdateError(message)


def tensors_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of all files."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


def metadata(names: list[str], dtypes: list[str], shapes: list[list[int]]) -> list[FlattenedTensorMetadata]:
    """SGLang's description of a flat bucket `[bytes]`."""
    found, at = [], 0
    for name, kind, shape in zip(names, dtypes, shapes, strict=True):
        dtype = getattr(torch, kind)
        size = math.prod(shape) * dtype.itemsize
        found.append(
            FlattenedTensorMetadata(
                name=name, shape=torch.Size(shape), dtype=dtype, start_idx=at, end_idx=at + size, numel=size
            )
        )
        at += size
    return found


def _save_states(states: list[Any], path: str) -> None:
    """SGLang gives the prompt's rows `[p, h]` first, then one row `[h]` a decoded token."""
    rows = [torch.tensor(part, dtype=torch.float32) for part in states]
    rows = [row if row.dim() == 2 else row[None] for row in rows]
    save_file({"prompt": rows[0].contiguous(), "decoded": torch.cat(rows[1:] or [rows[0][:0]])}, path)


def _end_with_trainer(fd: int, started: threading.Event) -> None:
    """A trainer that ends while the engine starts takes it along: nobody reads the pipe before."""
    poller = select.poll()
    poller.register(fd, 0)  # a hang-up is told without being asked for
    while not started.is_set():
        if poller.poll(1000) and not started.is_set():
            os.killpg(0, signal.SIGKILL)  # this process leads its session


def main() -> None:
    """Start the engine as the first message says, answer it, then serve."""
    pipe, started = Connection(int(sys.argv[1])), threading.Event()
    first = json.loads(pipe.recv_bytes())
    threading.Thread(target=_end_with_trainer, args=(pipe.fileno(), started), daemon=True).start()
    engine = sglang.Engine(**first["arguments"])
    started.set()
    host = Host(engine, pipe, tp_size=first["arguments"]["tp_size"])
    pipe.send_bytes(json.dumps({"id": first["id"], "value": os.getpid()}).encode())
    host.serve()
    engine.shutdown()


if __name__ == "__main__":
    main()
