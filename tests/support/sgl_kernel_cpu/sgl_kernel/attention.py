"""Attention over SGLang's paged cache, one request after the other, in float32.

Legend: t query rows, l keys of a request, n heads, g key/value heads, d head dim, b requests.
"""

import torch

_DECODE = (
    "decode_attention_cpu(Tensor query, Tensor(b!) k_cache, Tensor(c!) v_cache, float k_scale, "
    "float v_scale, Tensor(a!) output, Tensor? key, Tensor? value, Tensor loc, Tensor(d!) attn_logits, "
    "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, "
    "bool is_cross_attn, int sliding_window, Tensor? encoder_lens, Tensor? sinks) -> ()"
)
_EXTEND = (
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor k_buffer, Tensor v_buffer, "
    "float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    "Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float sm_scale, "
    "float logit_cap, bool is_cross_attn, int sliding_window, Tensor? encoder_lens, Tensor? sinks, "
    "Tensor? tree_mask, bool is_causal) -> ()"
)


def register_attention_operators() -> torch.library.Library:
    """Define `torch.ops.sgl_kernel.{decode,extend}_attention_cpu`; they live as long as what is returned."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for schema, function in ((_DECODE, decode_attention), (_EXTEND, extend_attention)):
        library.define(schema)
        library.impl(schema.split("(", 1)[0], function, "CPU")
    return library


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, cap: float, visible: torch.Tensor
) -> torch.Tensor:
    """q `[t, n, d]`, k and v `[l, g, d]`, visible bool `[t, l]`; returns `[t, n, d]` in float32."""
    repeats = q.shape[1] // k.shape[1]
    k = k.float().repeat_interleave(repeats, 1)
    v = v.float().repeat_interleave(repeats, 1)
    scores = torch.einsum("tnd,lnd->ntl", q.float(), k) * scale
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("ntl,lnd->tnd", scores.softmax(-1), v)


def _refuse(*, is_cross_attn: bool, encoder_lens: object, sinks: object, scales: tuple) -> None:
    if is_cross_attn or encoder_lens is not None or sinks is not None or scales != (1.0, 1.0):
        raise NotImplementedError("cross-attention, sinks and scaled caches have no stand-in on the CPU")


def decode_attention(
    query, k_cache, v_cache, k_scale, v_scale, output, key, value, loc, attn_logits, req_to_token,
    req_pool_indices, seq_lens, sm_scale, logit_cap, is_cross_attn, sliding_window, encoder_lens, sinks,
) -> None:  # fmt: skip
    """One new row a request: store its key and value at `loc`, then attend to all `seq_lens` rows."""
    _refuse(is_cross_attn=is_cross_attn, encoder_lens=encoder_lens, sinks=sinks, scales=(k_scale, v_scale))
    if key is not None:
        k_cache[loc] = key.view(len(loc), *k_cache.shape[1:]).to(k_cache.dtype)
        v_cache[loc] = value.view(len(loc), *v_cache.shape[1:]).to(v_cache.dtype)
    for row, (pool, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        places = req_to_token[pool, :length].long()
        visible = torch.ones(1, length, dtype=torch.bool)
        if sliding_window > 0:
            visible[:, : max(0, length - sliding_window)] = False
        out = attend(
            query[row : row + 1], k_cache[places], v_cache[places], scale=sm_scale, cap=logit_cap,
            visible=visible,
        )  # fmt: skip
        output[row : row + 1] = out.to(output.dtype)


def extend_attention(
    q, k, v, o, k_buffer, v_buffer, k_scale, v_scale, req_to_token, req_pool_indices, seq_lens,
    extend_seq_lens, extend_start_loc, max_len_extend, sm_scale, logit_cap, is_cross_attn, sliding_window,
    encoder_lens, sinks, tree_mask, is_causal,
) -> None:  # fmt: skip
    """The last `extend_seq_lens` rows of each request, whose keys and values the buffers hold already.

    `tree_mask` (flat bool) holds for each request either `[e, e]` among the new rows, the older ones being
    visible, or `[e, l]` over all rows.
    """
    _refuse(is_cross_attn=is_cross_attn, encoder_lens=encoder_lens, sinks=sinks, scales=(k_scale, v_scale))
    rows = zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), extend_start_loc.tolist(),
        strict=True,
    )  # fmt: skip
    masks = _tree_masks(tree_mask, seq_lens.tolist(), extend_seq_lens.tolist())
    for (pool, length, extend, start), mask in zip(rows, masks, strict=True):
        places = req_to_token[pool, :length].long()
        if mask is None:
            mask = _visible(length, extend, window=sliding_window, causal=is_causal)
        out = attend(
            q[start : start + extend], k_buffer[places], v_buffer[places], scale=sm_scale, cap=logit_cap,
            visible=mask,
        )  # fmt: skip
        o[start : start + extend] = out.to(o.dtype)


def _visible(length: int, extend: int, *, window: int, causal: bool) -> torch.Tensor:
    """bool `[e, l]` of an ordinary extension."""
    if not causal:
        return torch.ones(extend, length, dtype=torch.bool)
    query, key = torch.arange(length - extend, length)[:, None], torch.arange(length)
    visible = key <= query
    return visible & (key > query - window) if window > 0 else visible


def _tree_masks(
    tree_mask: torch.Tensor | None, lengths: list[int], extends: list[int]
) -> list[torch.Tensor | None]:
    if tree_mask is None:
        return [None] * len(lengths)
    flat = tree_mask.reshape(-1).bool()
    short = [e * e for e in extends]
    whole = [e * length for e, length in zip(extends, lengths, strict=True)]
    if flat.numel() not in (sum(short), sum(whole)):
        raise ValueError(f"a tree mask of {flat.numel()} values fits neither {sum(short)} nor {sum(whole)}")
    if flat.numel() == sum(short):
        inner = [part.view(e, e) for part, e in zip(flat.split(short), extends, strict=True)]
        return [
            torch.cat((torch.ones(e, length - e, dtype=torch.bool), part), 1)
            for part, e, length in zip(inner, extends, lengths, strict=True)
        ]
    return [
        part.view(e, length)
        for part, e, length in zip(flat[: sum(whole)].split(whole), extends, lengths, strict=True)
    ]
