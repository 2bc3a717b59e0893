"""Moving rows of the paged cache and of its tables, all in place.

`req_to_token` `[requests, longest]` holds the cache row of each position of each request in the pool.
"""

import ctypes

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, start: torch.Tensor, end: torch.Tensor,
    loc: torch.Tensor, pool_len: int,
) -> None:  # fmt: skip
    """Give request i's positions `start[i]` to `end[i]` the next rows of the flat `loc`."""
    taken = 0
    for pool, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[pool, first:last] = loc[taken : taken + last - first].to(req_to_token.dtype)
        taken += last - first


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, start: torch.Tensor, end: torch.Tensor,
    out: torch.Tensor, pool_len: int,
) -> None:  # fmt: skip
    """The reverse: rows of positions `start[i]` to `end[i]`, one request after the other, into `out`."""
    taken = 0
    for pool, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        out[taken : taken + last - first] = req_to_token[pool, first:last].to(out.dtype)
        taken += last - first


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, seq_lens: torch.Tensor, out: torch.Tensor,
    pool_len: int, topk: int, num_steps: int,
) -> None:  # fmt: skip
    """Rows of the `topk * num_steps` positions after each request's end, into `out`."""
    width = topk * num_steps
    for row, (pool, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        out.view(-1, width)[row] = req_to_token[pool, length : length + width].to(out.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, topk: int,
    num_steps: int, pool_len: int,
) -> torch.Tensor:  # fmt: skip
    """Tables `[b * topk, pool_len]` in which every branch sees the request and its own drafts alone."""
    tables = req_to_token.new_zeros(len(seq_lens) * topk, pool_len)
    for row, (pool, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        for branch in range(topk):
            table, first = tables[row * topk + branch], length + branch * num_steps
            table[:length] = req_to_token[pool, :length]
            table[length : length + num_steps] = req_to_token[pool, first : first + num_steps]
    return tables


def fill_bonus_tokens_cpu(
    accepted: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, stride: int
) -> None:
    """The last of each request's `lengths[i]` accepted tokens; request i's begin at `i * stride`."""
    last = torch.arange(len(lengths)) * stride + lengths.long() - 1
    out.copy_(accepted.view(-1)[last])


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, loc: torch.Tensor, out: torch.Tensor, size: int | None = None
) -> None:
    """The cache rows of the accepted places (-1: none), packed to the front of `out`."""
    flat = accept_index.reshape(-1)
    kept = flat[flat >= 0].long()
    out[: len(kept)] = loc[kept].to(out.dtype)


def rotate_input_ids_cpu(
    input_ids: torch.Tensor, start: torch.Tensor, lengths: torch.Tensor, topk_index: torch.Tensor,
    select: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Shift each request's tokens left by one and append `topk_index[i]` (at `select[i]` where given)."""
    new = topk_index.view(-1)
    for row, (first, length) in enumerate(zip(start.tolist(), lengths.tolist(), strict=True)):
        if length > 1:
            input_ids[first : first + length - 1] = input_ids[first + 1 : first + length].clone()
        if length > 0:
            place = first + length - 1 if select is None else int(select[row])
            input_ids[place] = new[row]


def copy_all_layer_kv_cache_cpu(
    pointers: torch.Tensor, strides: torch.Tensor, target: torch.Tensor, source: torch.Tensor
) -> None:
    """Copy cache rows `source` to `target` in every buffer, given by address and bytes a row.

    All rows are read before the first is written, for the two lists may overlap.
    """
    for address, stride in zip(pointers.view(torch.int64).tolist(), strides.tolist(), strict=True):
        address &= (1 << 64) - 1
        rows = [ctypes.string_at(address + place * stride, stride) for place in source.tolist()]
        for place, row in zip(target.tolist(), rows, strict=True):
            ctypes.memmove(address + place * stride, row, stride)
