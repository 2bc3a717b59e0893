"""Key/value cache in equal slots. Running requests always fill the first slots, without gaps.

Dense slots let a decode step attend by one call over a view, with no copy of keys. The price: when a
request ends, the last one moves into its slot (one copy of its rows), and a slot has room for the longest
sequence.
"""

import torch

from megatron_tlt.rollout.native.model import NativeModel


class SlotCache:
    """`data` `[layers, slots * stride, kv_width]`; slot i owns rows i * stride to (i + 1) * stride."""

    def __init__(
        self, model: NativeModel, *, max_batch: int, stride: int, max_bytes: int | None = None
    ) -> None:
        slot_bytes = model.shape.num_layers * stride * model.kv_width * model.dtype.itemsize
        self.slots = max_batch if max_bytes is None else min(max_batch, max_bytes // slot_bytes)
        if self.slots < 1:
            raise ValueError(
                f"a KV cache of {max_bytes} bytes holds no request of {stride} tokens, which needs "
                f"{slot_bytes} bytes: raise the bound or lower max_model_len"
            )
        self.stride = stride
        self.data = torch.zeros(
            model.shape.num_layers,
            self.slots * stride,
            model.kv_width,
            dtype=model.dtype,
            device=model.device,
        )
        self.first_row = torch.arange(self.slots, device=model.device) * stride

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.itemsize

    def copy(self, source: int, target: int, *, length: int) -> None:
        """Copy the first `length` rows of slot `source` to slot `target`."""
        a, b = source * self.stride, target * self.stride
        self.data[:, b : b + length] = self.data[:, a : a + length]
