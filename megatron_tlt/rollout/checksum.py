"""A checksum of named weights, for both ends of a weight update."""

import hashlib
from collections.abc import Iterable

import torch


class Checksum:
    """Order of the tensors does not matter; names, shapes, types and every bit do."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        head = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        digest = hashlib.blake2b(head, digest_size=16)
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        self.total = (self.total + int.from_bytes(digest.digest(), "little")) % (1 << 128)

    def value(self) -> str:
        return f"{self.total:032x}"


def weights_checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """128 bits in hexadecimal. Example: engine.update_weights(..., checksum=weights_checksum(pairs))."""
    total = Checksum()
    for name, tensor in tensors:
        total.add(name, tensor)
    return total.value()
