"""The stand-in for sgl_kernel, operation by operation, against brute force."""

import random

import pytest
import sgl_kernel
import sgl_kernel.speculative as speculative
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.skipif(
    not sgl_kernel.__version__.endswith("+torch"), reason="the real sgl_kernel is installed"
)
HEADS, GROUPS, DIM = 4, 2, 8


class Paged:
    """Three requests in a shuffled cache, and the same keys and values as dense tensors `[l, g, d]`."""

    def __init__(self, lengths: list[int], *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.tensor(lengths)
        self.pools = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
        self.places = torch.randperm(200, generator=generator).to(torch.int32)
        self.req_to_token = torch.zeros(len(lengths) + 2, 64, dtype=torch.int32)
        self.k, self.v = (torch.randn(200, GROUPS, DIM, generator=generator) for _ in range(2))
        start = 0
        for pool, length in zip(self.pools.tolist(), lengths, strict=True):
            self.req_to_token[pool, :length] = self.places[start : start + length]
            start += length

    def dense(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.req_to_token[self.pools[row], : self.lengths[row]].long()
        return self.k[rows], self.v[rows]


def sdpa(q, k, v, visible, *, scale: float) -> torch.Tensor:
    """q `[t, n, d]` over k, v `[l, g, d]`."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("window", [-1, 4])
def test_decoding_stores_the_new_row_and_attends_to_all(window):
    paged = Paged([1, 9, 30])
    new = [paged.req_to_token[p, n - 1] for p, n in zip(paged.pools, paged.lengths, strict=True)]
    key, value = torch.randn(3, GROUPS, DIM), torch.randn(3, GROUPS, DIM)
    q, out = torch.randn(3, HEADS, DIM), torch.zeros(3, HEADS, DIM)
    torch.ops.sgl_kernel.decode_attention_cpu(
        q, paged.k, paged.v, 1.0, 1.0, out, key, value, torch.stack(new).long(), torch.empty(0),
        paged.req_to_token, paged.pools, paged.lengths, 0.3, 0.0, False, window, None, None,
    )  # fmt: skip
    for row in range(3):
        k, v = paged.dense(row)
        assert torch.equal(k[-1], key[row]) and torch.equal(v[-1], value[row])
        place = torch.arange(len(k))
        visible = (place >= len(k) - window if window > 0 else place >= 0)[None]
        torch.testing.assert_close(out[row : row + 1], sdpa(q[row : row + 1], k, v, visible, scale=0.3))


@pytest.mark.parametrize("mode", ["causal", "window", "all", "short mask", "whole mask", "cap"])
def test_extending_attends_as_its_mask_says(mode):
    paged, extends = Paged([6, 12, 20]), [6, 3, 5]
    starts = torch.tensor([0, 6, 9])
    q, out = torch.randn(14, HEADS, DIM), torch.zeros(14, HEADS, DIM)
    trees = [torch.rand(e, e) < 0.5 for e in extends]
    for tree in trees:
        tree.fill_diagonal_(True)
    rows = []
    for row, (e, n) in enumerate(zip(extends, paged.lengths.tolist(), strict=True)):
        i, j = torch.arange(n - e, n)[:, None], torch.arange(n)[None]
        visible = {"causal": j <= i, "cap": j <= i, "window": (j <= i) & (i - j < 3)}.get(mode)
        if mode == "all":
            visible = torch.ones(e, n, dtype=torch.bool)
        elif "mask" in mode:
            visible = torch.cat((torch.ones(e, n - e, dtype=torch.bool), trees[row]), 1)
        rows.append(visible)
    mask = {"short mask": trees, "whole mask": rows}.get(mode)
    flat = None if mask is None else torch.cat([m.flatten() for m in mask])
    torch.ops.sgl_kernel.extend_attention_cpu(
        q, None, None, out, paged.k, paged.v, 1.0, 1.0, paged.req_to_token, paged.pools, paged.lengths,
        torch.tensor(extends), starts, 6, 0.3, 2.0 if mode == "cap" else 0.0, False,
        3 if mode == "window" else -1, None, None, flat, mode != "all",
    )  # fmt: skip
    for row, start in enumerate(starts.tolist()):
        k, v = paged.dense(row)
        own = q[start : start + extends[row]]
        if mode == "cap":
            k2, v2 = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            scores = 2.0 * torch.tanh(torch.einsum("tnd,lnd->ntl", own, k2) * 0.3 / 2.0)
            scores = scores.masked_fill(~rows[row], float("-inf"))
            expected = torch.einsum("ntl,lnd->tnd", scores.softmax(-1), v2)
        else:
            expected = sdpa(own, k, v, rows[row], scale=0.3)
        torch.testing.assert_close(out[start : start + extends[row]], expected)


def grown_tree(rng: random.Random, *, topk: int, depth: int, count: int) -> tuple[list, list, list[int]]:
    """Candidates as SGLang numbers them: (parent_list, selected, parent node of each node).

    Level 0 has `topk` candidates of the root; level i >= 1 has `topk` of each of `topk` beams.
    """
    beams, parent_of = [-1], {}
    for candidate in range(topk):
        parent_of[candidate] = None
    level, start = list(range(topk)), topk
    for _ in range(1, depth):
        chosen = sorted(rng.sample(level, topk))
        beams += chosen
        level = []
        for beam in chosen:
            for _ in range(topk):
                parent_of[start] = beam
                level.append(start)
                start += 1
    selected: list[int] = []
    while len(selected) < count - 1:
        open_ones = [c for c, p in parent_of.items() if c not in selected and (p is None or p in selected)]
        selected.append(rng.choice(open_ones))
    selected.sort()
    node = {candidate: i for i, candidate in enumerate(selected, 1)}
    parents = [-1] + [0 if parent_of[c] is None else node[parent_of[c]] for c in selected]
    return beams, selected, parents


def path_to(node: int, parents: list[int]) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def children_by_links(next_token: list[int], next_sibling: list[int]) -> list[list[int]]:
    found = []
    for child in next_token:
        found.append([])
        while child != -1:
            found[-1].append(child)
            child = next_sibling[child]
    return found


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize(("topk", "depth", "count"), [(1, 4, 5), (3, 3, 10), (4, 2, 8)])
def test_trees_are_laid_out_with_masks_links_and_positions(mode, topk, depth, count):
    rng, lengths = random.Random(topk), torch.tensor([5, 11, 2])
    trees = [grown_tree(rng, topk=topk, depth=depth, count=count) for _ in lengths]
    beams, selected = (torch.tensor([t[i] for t in trees]) for i in (0, 1))
    sizes = [count * count if mode else count * (int(n) + count) for n in lengths]
    mask = torch.ones(sum(sizes), dtype=torch.bool)
    positions = torch.zeros(3 * count, dtype=torch.int64)
    index, child, sibling = (torch.full((3, count), -1) for _ in range(3))
    sgl_kernel.build_tree_kernel_efficient_cpu(
        beams, selected, lengths, mask, positions, index, child, sibling, topk, depth, count, mode
    )
    for row, (part, (_, _, parents)) in enumerate(zip(mask.split(sizes), trees, strict=True)):
        seen = part.view(count, -1)
        assert seen[:, : seen.shape[1] - count].all()
        wanted = [[j in path_to(i, parents) for j in range(count)] for i in range(count)]
        assert seen[:, seen.shape[1] - count :].tolist() == wanted
        depths = [len(path_to(i, parents)) - 1 for i in range(count)]
        assert (positions.view(3, count)[row] - lengths[row]).tolist() == depths
        links = children_by_links(child[row].tolist(), sibling[row].tolist())
        assert links == [[j for j in range(count) if parents[j] == i] for i in range(count)]
    assert index.flatten().tolist() == list(range(3 * count))
    if mode:
        again = [torch.full_like(t, -7) for t in (positions, index, child, sibling)]
        speculative.reconstruct_indices_from_tree_mask(mask, lengths, *again, 3, count)
        for ours, theirs in zip(again, (positions, index, child, sibling), strict=True):
            assert torch.equal(ours, theirs)


def test_a_draft_without_its_parent_is_never_accepted():
    index, child, sibling = (torch.full((1, 3), -1) for _ in range(3))
    mask, positions = torch.zeros(9, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    # Candidate 4 belongs to beam 2, whose own candidate 1 is left out.
    sgl_kernel.build_tree_kernel_efficient_cpu(
        torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 4]]), torch.tensor([7]), mask, positions, index, child,
        sibling, 2, 2, 3, 1,
    )  # fmt: skip
    assert children_by_links(child[0].tolist(), sibling[0].tolist()) == [[1], [], []]


@pytest.mark.parametrize("seed", range(5))
def test_the_greedy_walk_is_the_longest_path_that_the_target_agrees_with(seed):
    rng, count, depth, rows = random.Random(seed), 12, 4, 3
    trees = [grown_tree(rng, topk=3, depth=depth, count=count)[2] for _ in range(rows)]
    candidates = torch.tensor([[rng.randrange(3) for _ in range(count)] for _ in range(rows)])
    target = torch.tensor([[rng.randrange(3) for _ in range(count)] for _ in range(rows)])
    masks = [[j in path_to(i, p) for i in range(count) for j in range(count)] for p in trees]
    positions, mask = torch.zeros(rows * count, dtype=torch.int64), torch.tensor(masks).flatten()
    index, child, sibling = (torch.full((rows, count), -1) for _ in range(3))
    sgl_kernel.reconstruct_indices_from_tree_mask_cpu(
        mask, torch.zeros(rows, dtype=torch.int64), positions, index, child, sibling, rows, count
    )
    predicts = torch.full((rows * count,), -1, dtype=torch.int32)
    accepted = torch.full((rows, depth + 1), -1, dtype=torch.int32)
    number = torch.zeros(rows, dtype=torch.int32)
    sgl_kernel.verify_tree_greedy_cpu(
        predicts, accepted, number, candidates, index, child, sibling, target.to(torch.int32)
    )
    for row, parents in enumerate(trees):
        agreed = [
            path
            for path in (path_to(i, parents) for i in range(count))
            if all(candidates[row, n] == target[row, parents[n]] for n in path[1:])
        ]
        longest = max(map(len, agreed))
        assert int(number[row]) == longest - 1
        walked = [int(i) - row * count for i in accepted[row] if i >= 0]
        assert walked in agreed and len(walked) == longest
        assert [int(predicts[row * count + n]) for n in walked] == [int(target[row, n]) for n in walked]


def test_sampled_trees_emit_the_targets_distribution():
    """Root 0 with children 1 and 2, node 1 with child 3: chi-square of first and second tokens."""
    rows, vocab = 20_000, 5
    torch.manual_seed(0)
    probs = torch.softmax(torch.randn(4, vocab), -1)
    drafts = torch.tensor([0, 3, 1, 2])  # tokens of the nodes
    index = torch.arange(rows * 4).view(rows, 4)
    child = torch.tensor([1, 3, -1, -1]).expand(rows, 4)
    sibling = torch.tensor([-1, 2, -1, -1]).expand(rows, 4)
    predicts = torch.full((rows * 4,), -1, dtype=torch.int32)
    accepted = torch.full((rows, 3), -1, dtype=torch.int32)
    number = torch.zeros(rows, dtype=torch.int32)
    sgl_kernel.tree_speculative_sampling_target_only(
        predicts, accepted, number, drafts.expand(rows, 4), index, child, sibling, torch.rand(rows, 4),
        torch.rand(rows), probs.expand(rows, 4, vocab), torch.zeros(1),
    )  # fmt: skip
    emitted = predicts.view(rows, 4)

    def check(tokens: torch.Tensor, node: int) -> None:
        expected = probs[node] * len(tokens)
        statistic = ((torch.bincount(tokens.long(), minlength=vocab) - expected).square() / expected).sum()
        assert statistic < (vocab - 1) + 4 * (2 * (vocab - 1)) ** 0.5

    check(emitted[:, 0], 0)
    for token, node in ((3, 1), (1, 2)):
        taken = emitted[:, 0] == token
        assert torch.equal(taken, (accepted[:, 1] - torch.arange(rows) * 4) == node)
        check(emitted[taken, node], node)
    deeper = (emitted[:, 0] == 3) & (emitted[:, 1] == 2)
    assert torch.equal(number == 2, deeper)
    check(emitted[deeper, 3], 3)
    assert torch.equal(number >= 1, (emitted[:, 0] == 3) | (emitted[:, 0] == 1))


def test_truncated_distributions_keep_the_largest_and_sum_to_one():
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.7, 0.1, 0.15, 0.05]])
    out = sgl_kernel.top_k_renorm_prob(probs, torch.tensor([2, 4]))
    torch.testing.assert_close(out[0], torch.tensor([0, 4 / 7, 3 / 7, 0]))
    torch.testing.assert_close(out[1], probs[1])
    out = sgl_kernel.top_p_renorm_prob(probs, torch.tensor([0.65, 0.5]))
    torch.testing.assert_close(out[0], torch.tensor([0, 4 / 7, 3 / 7, 0]))
    torch.testing.assert_close(out[1], torch.tensor([1.0, 0, 0, 0]))


def test_tables_are_filled_and_read_position_by_position():
    table, pools = torch.zeros(4, 20, dtype=torch.int32), torch.tensor([2, 0])
    start, end, rows = torch.tensor([3, 0]), torch.tensor([7, 2]), torch.tensor([11, 12, 13, 14, 21, 22])
    sgl_kernel.assign_req_to_token_pool_cpu(pools, table, start, end, rows, 20)
    assert table[2].tolist() == [0] * 3 + [11, 12, 13, 14] + [0] * 13
    assert table[0, :2].tolist() == [21, 22] and not table[[1, 3]].any()
    out = torch.zeros(6, dtype=torch.int64)
    sgl_kernel.assign_extend_cache_locs_cpu(pools, table, start, end, out, 20)
    assert torch.equal(out, rows)
    table = torch.arange(80, dtype=torch.int32).view(4, 20)
    out = torch.zeros(2 * 6, dtype=torch.int64)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(pools, table, torch.tensor([5, 9]), out, 20, 3, 2)
    assert out.tolist() == [*range(45, 51), *range(9, 15)]


def test_every_branch_sees_the_request_and_its_own_drafts():
    table, pools, lengths = torch.arange(80, dtype=torch.int32).view(4, 20), torch.tensor([3, 1]), [4, 2]
    out = sgl_kernel.build_draft_decode_metadata_cpu(table, pools, torch.tensor(lengths), 2, 3, 20)
    assert out.shape == (4, 20)
    for row, length in enumerate(lengths):
        first = 20 * int(pools[row])
        for branch in range(2):
            own = [first + length + branch * 3 + i for i in range(3)]
            seen = out[2 * row + branch, : length + 3].tolist()
            assert seen == [*range(first, first + length), *own]


def test_accepted_tokens_rows_and_shifted_inputs():
    accepted, lengths = torch.arange(10), torch.tensor([3, 1])
    bonus = torch.zeros(2, dtype=torch.int64)
    sgl_kernel.fill_bonus_tokens_cpu(accepted, lengths, bonus, 5)
    assert bonus.tolist() == [2, 5]
    out = torch.zeros(4, dtype=torch.int64)
    index = torch.tensor([[0, 3, -1], [6, -1, -1]])
    sgl_kernel.fill_accept_out_cache_loc_cpu(index, torch.arange(100, 110), out)
    assert out.tolist() == [100, 103, 106, 0]
    ids = torch.tensor([1, 2, 3, 9, 4, 5])
    sgl_kernel.rotate_input_ids_cpu(
        ids, torch.tensor([0, 3, 4]), torch.tensor([3, 1, 2]), torch.tensor([[7], [8], [6]])
    )
    assert ids.tolist() == [2, 3, 7, 8, 5, 6]
    ids = torch.tensor([1, 2, 3])
    sgl_kernel.rotate_input_ids_cpu(
        ids, torch.tensor([0]), torch.tensor([3]), torch.tensor([7]), torch.tensor([1])
    )
    assert ids.tolist() == [2, 7, 3]


def test_cache_rows_move_at_once():
    buffers = [torch.randn(12, 2, 3), torch.randn(12, 5).bfloat16()]
    expected = [b.clone() for b in buffers]
    target, source = torch.tensor([3, 4, 0]), torch.tensor([4, 5, 3])
    for b in expected:
        b[target] = b[source]
    pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.int64).view(torch.uint64)
    strides = torch.tensor([b[0].nbytes for b in buffers])
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    assert all(torch.equal(a, b) for a, b in zip(buffers, expected, strict=True))


def test_what_is_not_there_says_so():
    with pytest.raises(NotImplementedError, match="moe_align"):
        sgl_kernel.moe_align(1)
    assert not hasattr(sgl_kernel, "convert_weight_packed")
