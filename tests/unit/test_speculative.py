"""Verification rules against exact enumeration on a tiny vocabulary.

Each case verifies many independent requests with the same context and compares the frequencies of the first
two emitted tokens with p(x1) p(x2 | x1). A rule with a known mistake must fail the same check.
"""

import math

import pytest
import torch

from megatron_tlt.ops.sampling import SamplingTensors, inverse_cdf, target_probs, uniforms
from megatron_tlt.ops.speculative import (
    accepted_path,
    ancestor_mask,
    best_nodes,
    match_tree,
    reject_chain,
    reject_tree,
    residual,
    tree_mask,
)

VOCAB = 5
SETTINGS = {
    "T=1": dict(temperature=1.0),
    "T=0.7": dict(temperature=0.7),
    "top_k": dict(temperature=1.0, top_k=3),
    "top_p": dict(temperature=0.7, top_p=0.8),
    "min_p": dict(temperature=1.0, min_p=0.2),
}


def _logits(*prefix: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(
        1000 + sum((x + 1) * 7**i for i, x in enumerate(prefix))
    )
    return torch.randn(VOCAB, generator=generator) * 1.5


def _target(setting: str, *prefix: int) -> torch.Tensor:
    values = SETTINGS[setting]
    row = {name: torch.tensor([value]) for name, value in values.items()}
    return target_probs(_logits(*prefix)[None], SamplingTensors(**row))[0]


def _draft(*prefix: int) -> torch.Tensor:
    """A drafter that resembles the target but is wrong."""
    return torch.softmax(_logits(*prefix) * 0.6 + _logits(99, *prefix) * 0.5, -1)


def _exact(setting: str) -> torch.Tensor:
    first = _target(setting)
    return torch.stack([first[x] * _target(setting, x) for x in range(VOCAB)])


def _chi_square_excess(pairs: torch.Tensor, exact: torch.Tensor) -> float:
    """Standard deviations by which the statistic exceeds its mean; impossible pairs count as infinite."""
    observed = torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2).double()
    expected = exact.flatten().double() * len(pairs)
    if observed[expected == 0].any():
        return math.inf
    used = expected > 5
    statistic = ((observed - expected).square() / expected)[used].sum()
    freedom = int(used.sum()) - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def _table(setting: str) -> torch.Tensor:
    """`[v + 1, v]`: row x is the target after token x, the last row the target at the root."""
    return torch.stack([_target(setting, x) for x in range(VOCAB)] + [_target(setting)])


def _shared_randomness(setting: str, *, count: int, tree: bool, mutate: bool = False):
    """First two tokens of `count` requests verified against a fixed draft, by `match_tree`."""
    best = _draft().topk(2).indices.tolist()
    tokens, parents, depths = [0, best[0], int(_draft(best[0]).argmax())], [0, 0, 1], [0, 1, 2]
    if tree:  # two branches at the root, two leaves under the first
        tokens = [0, best[0], best[1], *_draft(best[0]).topk(2).indices.tolist()]
        parents, depths = [0, 0, 0, 1, 1], [0, 1, 1, 2, 2]
    table, seeds = _table(setting), torch.arange(count) * 7919 + 13
    rows = torch.tensor([VOCAB] + tokens[1:])
    draws = torch.stack(
        [inverse_cdf(table[r].expand(count, -1), uniforms(seeds, torch.tensor(d)))
         for r, d in zip(rows.tolist(), depths, strict=True)], 1,
    )  # fmt: skip
    drafted = torch.tensor(tokens).expand(count, -1)
    matched = draws
    if mutate:  # "typical acceptance": take a first child that the target finds likely enough
        matched = draws.clone()
        for node, child in ((0, 1), (1, parents.index(1))):
            if table[rows[node], tokens[child]] > 0.05:
                matched[:, node] = tokens[child]
    accepted = match_tree(drafted, torch.tensor(parents).expand(count, -1), matched, depth=2)
    order, length = accepted_path(accepted, torch.tensor(depths).expand(count, -1))
    emitted = torch.cat((drafted.gather(1, order)[:, 1:], draws.new_zeros(count, 1)), 1)
    last = order.gather(1, length[:, None] - 1)
    emitted.scatter_(1, length[:, None] - 1, draws.gather(1, last))
    second = inverse_cdf(table[emitted[:, 0]], uniforms(seeds, torch.tensor(1)))
    return torch.stack((emitted[:, 0], torch.where(length >= 2, emitted[:, 1], second)), 1), length


def _plain(setting: str, *, count: int) -> torch.Tensor:
    """The same requests without speculation."""
    table, seeds = _table(setting), torch.arange(count) * 7919 + 13
    first = inverse_cdf(table[VOCAB].expand(count, -1), uniforms(seeds, torch.tensor(0)))
    return torch.stack((first, inverse_cdf(table[first], uniforms(seeds, torch.tensor(1)))), 1)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_deterministic_drafts_keep_the_distribution_and_the_very_tokens(setting, tree):
    pairs, length = _shared_randomness(setting, count=60000, tree=tree)
    assert _chi_square_excess(pairs, _exact(setting)) < 4
    assert length.float().mean() > 1.1
    assert torch.equal(pairs, _plain(setting, count=60000))


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_acceptance_is_the_target_mass_on_the_drafted_siblings(tree):
    _, length = _shared_randomness("T=1", count=60000, tree=tree)
    siblings = _draft().topk(2 if tree else 1).indices
    assert abs((length >= 2).float().mean() - _target("T=1")[siblings].sum()) < 0.01


def _chain(setting: str, *, count: int, rule=reject_chain) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    first = inverse_cdf(
        _draft().expand(count, -1), torch.rand(count, dtype=torch.float64, generator=generator)
    )
    after = torch.stack([_draft(x) for x in range(VOCAB)])
    second = inverse_cdf(after[first], torch.rand(count, dtype=torch.float64, generator=generator))
    table = _table(setting)
    deeper = torch.softmax(torch.randn(VOCAB, generator=generator), -1)
    accepted, final = rule(
        torch.stack((first, second), 1),
        torch.stack((_draft().expand(count, -1), after[first]), 1),
        torch.stack((table[VOCAB].expand(count, -1), table[first], deeper.expand(count, -1)), 1),
        accept_uniform=torch.rand(count, 2, dtype=torch.float64, generator=generator),
        final_uniform=torch.rand(count, dtype=torch.float64, generator=generator),
    )
    x1 = torch.where(accepted >= 1, first, final)
    drawn = inverse_cdf(table[x1], torch.rand(count, dtype=torch.float64, generator=generator))
    x2 = torch.where(accepted >= 2, second, torch.where(accepted == 1, final, drawn))
    return torch.stack((x1, x2), 1)


@pytest.mark.parametrize("setting", SETTINGS)
def test_sampled_chains_keep_the_distribution(setting):
    assert _chi_square_excess(_chain(setting, count=60000), _exact(setting)) < 4


def test_sampled_chain_accepts_the_overlap_of_p_and_q():
    count = 40000
    generator = torch.Generator().manual_seed(2)
    tokens = inverse_cdf(
        _draft().expand(count, -1), torch.rand(count, dtype=torch.float64, generator=generator)
    )
    accepted, _ = reject_chain(
        tokens[:, None],
        _draft().expand(count, 1, -1),
        _target("T=1").expand(count, 2, -1),
        accept_uniform=torch.rand(count, 1, dtype=torch.float64, generator=generator),
        final_uniform=torch.rand(count, dtype=torch.float64, generator=generator),
    )
    overlap = torch.minimum(_draft(), _target("T=1")).sum()
    assert abs(accepted.float().mean() - overlap) < 0.01


def _sampled_tree(setting: str, *, count: int) -> torch.Tensor:
    """Two siblings drawn without replacement at the root, two below the first of them."""
    generator, table, pairs = torch.Generator().manual_seed(9), _table(setting), []
    parents = [0, 0, 0, 1, 1]
    for _ in range(count):
        roots = torch.multinomial(_draft(), 2, generator=generator)
        below = _draft(int(roots[0]))
        leaves = torch.multinomial(below, 2, generator=generator)
        tokens = torch.cat((roots.new_zeros(1), roots, leaves))
        drafts = torch.stack((_draft(), below, below, below, below))
        targets = table[torch.cat((roots.new_tensor([VOCAB]), roots, leaves))]
        uniform = torch.rand(6, dtype=torch.float64, generator=generator)
        path, final = reject_tree(tokens, parents, drafts, targets, uniform=uniform)
        emitted = [int(tokens[i]) for i in path[1:]] + [final]
        if len(emitted) == 1:
            rest = torch.rand(1, dtype=torch.float64, generator=generator)
            emitted.append(int(inverse_cdf(table[emitted[0]][None], rest)))
        pairs.append(emitted[:2])
    return torch.tensor(pairs)


@pytest.mark.parametrize("setting", ["T=1", "top_p"])
def test_sampled_trees_keep_the_distribution(setting):
    assert _chi_square_excess(_sampled_tree(setting, count=3000), _exact(setting)) < 4


def _without_residual(tokens, draft_probs, target_probs, *, accept_uniform, final_uniform):
    """Wrong: after a rejection the target itself is drawn."""
    accepted, _ = reject_chain(
        tokens,
        draft_probs,
        target_probs,
        accept_uniform=accept_uniform,
        final_uniform=final_uniform,
    )
    at = accepted[:, None, None].expand(-1, 1, VOCAB)
    return accepted, inverse_cdf(target_probs.gather(1, at).squeeze(1), final_uniform)


def _greedy_draft_with_soft_q(tokens, draft_probs, target_probs, **uniform):
    """Wrong: the draft was an argmax, but q is claimed to be the softmax."""
    return reject_chain(draft_probs.argmax(-1), draft_probs, target_probs, **uniform)


@pytest.mark.parametrize("rule", [_without_residual, _greedy_draft_with_soft_q])
def test_a_wrong_chain_rule_is_caught(rule):
    assert _chi_square_excess(_chain("T=1", count=60000, rule=rule), _exact("T=1")) > 10


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_wrong_acceptance_is_caught(tree):
    pairs, _ = _shared_randomness("T=1", count=60000, tree=tree, mutate=True)
    assert _chi_square_excess(pairs, _exact("T=1")) > 10


def test_residual_of_equal_distributions_stays_a_distribution():
    p = torch.softmax(_logits(), -1)
    assert torch.equal(residual(p, p), p)
    assert abs(residual(p, _draft()).sum() - 1) < 1e-6


def test_ancestors_and_path_of_a_tree():
    parents = torch.tensor([[0, 0, 0, 1, 3]])
    expected = torch.zeros(5, 5, dtype=torch.bool)
    for node, line in enumerate(([0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4])):
        expected[node, line] = True
    assert torch.equal(ancestor_mask(parents, depth=3)[0], expected)
    accepted = torch.tensor([[True, True, False, True, False]])
    order, length = accepted_path(accepted, torch.tensor([[0, 1, 1, 2, 3]]))
    assert length.item() == 3 and order[0, :3].tolist() == [0, 1, 3]


def test_the_budget_goes_to_the_nodes_likeliest_to_survive():
    scores = torch.tensor([[-0.1, -0.2, -0.3, -0.4], [-2.0, -4.0, -6.0, -math.inf]])
    expected = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    assert torch.equal(best_nodes(scores, total=5), expected)
    assert best_nodes(scores, total=5, cap=2).sum(1).tolist() == [2, 2]
    assert best_nodes(scores, total=100).sum(1).tolist() == [4, 3]


def test_equal_scores_keep_whole_paths():
    """A child never stays without its parent, nor gets a request two nodes before another has one."""
    kept = best_nodes(torch.zeros(3, 4), total=7)
    assert kept.sum(1).tolist() == [3, 2, 2]
    assert torch.equal(kept.long().sort(1, descending=True).values, kept.long())


def test_tree_mask_shows_the_cache_and_the_path():
    sees = ancestor_mask(torch.tensor([[0, 0, 0, 1]]), depth=2).expand(2, -1, -1)
    mask = tree_mask(sees, torch.tensor([2, 1]), kv_len=6, dtype=torch.float32)
    visible = (mask == 0)[:, 0].int()
    assert visible[0].tolist() == [
        [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 1],
    ]  # fmt: skip
    assert visible[1].tolist() == [
        [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0], [1, 1, 1, 0, 1, 0],
    ]  # fmt: skip
