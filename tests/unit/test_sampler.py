"""Who draws which sample when: independent of ranks, micro-batches, workers and interruptions."""

import itertools

import numpy as np
import pytest
import torch

from megatron_tlt.data.indexed import IndexedDatasetWriter
from megatron_tlt.data.pretrain import DataConfig, build_datasets
from megatron_tlt.data.sampler import PretrainSampler, build_batch_iterator
from megatron_tlt.data.tokenizer_plain import NullTokenizer


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """About 60 samples an epoch, 400 in the order: more than six epochs."""
    folder = tmp_path_factory.mktemp("tokens")
    rng = np.random.RandomState(1)
    with IndexedDatasetWriter(folder / "data", dtype=np.uint16) as writer:
        for length in rng.randint(1, 60, 18):
            writer.add_document(rng.randint(0, 90, length))
    return build_datasets(
        DataConfig(data_path=[str(folder / "data")], split="1"),
        tokenizer=NullTokenizer(90),
        seq_length=8,
        num_samples=(400, 0, 0),
        seed=5,
    )[0]


def ramp(consumed):
    """Global batch 8, then 16 from 40 samples on, then 32 from 120 on."""
    return 8 if consumed < 40 else 16 if consumed < 120 else 32


def make_sampler(dataset, *, consumed=0, micro_batch_size=2, rank=0, size=1, batch=ramp):
    return PretrainSampler(
        num_samples=len(dataset),
        consumed_samples=consumed,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=rank,
        data_parallel_size=size,
        global_batch_size=batch,
    )


def sample_log(dataset, steps, *, consumed=0, micro_batch_size=2, size=1):
    """(sample ids of each step as all ranks together see them, sorted; consumed samples)."""
    iterators = [
        build_batch_iterator(
            dataset,
            sampler=make_sampler(
                dataset,
                consumed=consumed,
                micro_batch_size=micro_batch_size,
                rank=rank,
                size=size,
            ),
            num_workers=0,
        )
        for rank in range(size)
    ]
    log = []
    for _ in range(steps):
        batch = ramp(consumed)
        ids = []
        for iterator in iterators:
            for _ in range(batch // (micro_batch_size * size)):
                ids += next(iterator)["sample_id"].tolist()
        log.append(sorted(ids))
        consumed += batch
    return log, consumed


@pytest.mark.parametrize(("micro_batch_size", "size"), [(1, 1), (2, 4), (4, 2), (1, 8)])
def test_samples_of_a_step_depend_on_neither_ranks_nor_micro_batches(
    dataset, micro_batch_size, size
):
    reference, _ = sample_log(dataset, 12)
    assert sample_log(dataset, 12, micro_batch_size=micro_batch_size, size=size)[0] == reference


@pytest.mark.parametrize("stop", [1, 3, 7, 11])
@pytest.mark.parametrize("size_after", [1, 4])
def test_interrupted_run_draws_the_samples_of_the_uninterrupted_one(dataset, stop, size_after):
    """Stops within an epoch and after it, at both ramp steps, and goes on with other ranks."""
    whole, total = sample_log(dataset, 14)
    assert total > 3 * 60
    before, consumed = sample_log(dataset, stop, size=2)
    after, end = sample_log(dataset, 14 - stop, consumed=consumed, size=size_after)
    assert before + after == whole
    assert end == total


def test_every_sample_of_the_order_is_drawn_once(dataset):
    drawn = [
        index
        for rank in range(2)
        for micro_batch in make_sampler(dataset, rank=rank, size=2)
        for index in micro_batch
    ]
    assert sorted(drawn) == list(range(len(drawn)))
    assert len(drawn) > len(dataset) - 32


def test_micro_batches_lie_as_megatrons_do(dataset):
    sampler = make_sampler(dataset, rank=1, size=2, batch=lambda consumed: 8)
    assert list(itertools.islice(sampler, 3)) == [[2, 3], [6, 7], [10, 11]]


def test_worker_processes_change_nothing(dataset):
    batches = [
        list(
            itertools.islice(
                build_batch_iterator(
                    dataset, sampler=make_sampler(dataset), num_workers=num_workers
                ),
                12,
            )
        )
        for num_workers in (0, 2)
    ]
    for alone, with_workers in zip(*batches, strict=True):
        assert alone.keys() == with_workers.keys()
        for name in alone:
            assert torch.equal(alone[name], with_workers[name])


def test_batch_has_the_promised_shapes_and_labels_follow_tokens(dataset):
    batch = next(build_batch_iterator(dataset, sampler=make_sampler(dataset), num_workers=0))
    assert {name: (value.dtype, tuple(value.shape)) for name, value in batch.items()} == {
        "tokens": (torch.int64, (2, 8)),
        "labels": (torch.int64, (2, 8)),
        "loss_mask": (torch.float32, (2, 8)),
        "position_ids": (torch.int64, (2, 8)),
        "sample_id": (torch.int64, (2,)),
    }
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])


def test_loading_leaves_the_global_generator_alone(dataset):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    next(build_batch_iterator(dataset, sampler=make_sampler(dataset), num_workers=0))
    assert torch.equal(torch.rand(2), expected)


def test_ends_before_a_step_that_cannot_be_filled(dataset):
    sampler = make_sampler(dataset, consumed=len(dataset) - 100, batch=lambda consumed: 64)
    assert sum(map(len, sampler)) == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"consumed": 10_000}, "10000 consumed, the next step needs 10032"),
        ({"micro_batch_size": 3}, "global batch size 8 .* micro batch size 3"),
    ],
)
def test_unusable_sizes_are_refused_with_numbers(dataset, options, message):
    with pytest.raises(ValueError, match=message):
        next(iter(make_sampler(dataset, **options)))
