"""Sample order, masks and blends against megatron-core; the index cache shared by ranks."""

import itertools
import types

import numpy as np
import pytest

from megatron_tlt import mcore  # noqa: F401  (before megatron.core)
from megatron_tlt.data.blend import build_blend_index, normalize, parse_blend
from megatron_tlt.data.gpt_dataset import order_digest
from megatron_tlt.data.gpt_index import build_sample_index, plan_samples
from megatron_tlt.data.indexed import IndexedDatasetWriter
from megatron_tlt.data.mock import MockTokens
from megatron_tlt.data.pretrain import DataConfig, build_datasets, split_bounds
from megatron_tlt.data.provenance import write_provenance
from megatron_tlt.data.tokenizer_plain import NullTokenizer

from megatron.core.datasets import gpt_dataset as megatron_gpt  # isort: skip
from megatron.core.datasets import helpers as megatron_helpers  # isort: skip
from megatron.core.datasets.blended_megatron_dataset_builder import (  # isort: skip
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.blended_megatron_dataset_config import (  # isort: skip
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.utils import get_blend_from_list  # isort: skip

SEQ_LENGTH = 16
VOCAB = 100
EOD = 100


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    """Three token files of 40, 25 and 60 documents, some of them empty."""
    folder = tmp_path_factory.mktemp("tokens")
    rng = np.random.RandomState(7)
    names = []
    for name, count in (("a", 40), ("b", 25), ("c", 60)):
        with IndexedDatasetWriter(folder / name, dtype=np.uint16) as writer:
            for place, length in enumerate(rng.randint(0, 60, count)):
                tokens = [*rng.randint(0, VOCAB, length).tolist(), EOD]
                writer.add_document([] if place % 11 == 5 else tokens)
        names.append(str(folder / name))
    return names


def megatron_tokenizer():
    return types.SimpleNamespace(
        vocab_size=VOCAB + 1, eod=EOD, eos=EOD, pad=-1, unique_identifiers={"class": "test"}
    )


def build_megatron(paths, num_samples, *, seed, split="90,10,0", own_paths=None, **options):
    config = megatron_gpt.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=SEQ_LENGTH,
        blend=None if own_paths else get_blend_from_list(paths),
        blend_per_split=own_paths and [get_blend_from_list(own) for own in own_paths],
        split=None if own_paths else split,
        tokenizer=megatron_tokenizer(),
        reset_position_ids=options.pop("reset_position_ids", False),
        reset_attention_mask=False,
        eod_mask_loss=options.pop("eod_mask_loss", False),
        create_attention_mask=False,
        **options,
    )
    builder = BlendedMegatronDatasetBuilder(
        megatron_gpt.GPTDataset, list(num_samples), lambda: True, config
    )
    return builder.build()


def build_ours(num_samples, *, seed, tmp_path, tokenizer=None, seq_length=SEQ_LENGTH, **options):
    return build_datasets(
        DataConfig(data_cache_path=str(tmp_path / "cache"), **{"split": "90,10,0"} | options),
        tokenizer=tokenizer or NullTokenizer(VOCAB),
        seq_length=seq_length,
        num_samples=num_samples,
        seed=seed,
    )


def assert_same_samples(ours, theirs):
    assert len(ours) == len(theirs)
    for index in range(len(ours)):
        mine, reference = ours[index], theirs[index]
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            np.testing.assert_array_equal(mine[name], reference[name].numpy(), err_msg=name)


# Samples in one epoch of file a's training part: about 70. 100: a second epoch, shuffled by itself
# (30 of 70 are used); 130: not by itself (60 of 70); 500: many epochs.
@pytest.mark.parametrize("num_train", [5, 100, 130, 500])
@pytest.mark.parametrize(("seed", "split"), [(1234, "90,10,0"), (5, "60,30,10")])
def test_sample_order_equals_megatron(tmp_path, prefixes, num_train, seed, split):
    wanted = (num_train, 9, 3 if split == "60,30,10" else 0)
    ours = build_ours(wanted, seed=seed, tmp_path=tmp_path, data_path=prefixes[:1], split=split)
    theirs = build_megatron(prefixes[:1], wanted, seed=seed, split=split)
    for mine, reference, count in zip(ours, theirs, wanted, strict=True):
        if count:
            assert_same_samples(mine, reference)


def test_separate_last_epoch_is_covered_both_ways(prefixes):
    tokens = 70 * SEQ_LENGTH + 1
    plans = [plan_samples(tokens, num_samples=n, seq_length=SEQ_LENGTH) for n in (100, 130)]
    assert [(plan.num_epochs, plan.separate_final_epoch) for plan in plans] == [
        (2, True),
        (2, False),
    ]


@pytest.mark.parametrize(
    ("weights", "num_train"),
    [*itertools.product([("30", "70", "11"), ("1", "1", "1")], [60, 150, 700]), (None, 150)],
)
def test_blend_equals_megatron(tmp_path, prefixes, weights, num_train):
    paths = prefixes
    if weights:
        paths = [word for pair in zip(weights, prefixes, strict=True) for word in pair]
    ours, valid, _ = build_ours(
        (num_train, 8, 0), seed=3, tmp_path=tmp_path, data_path=paths, split="80,20,0"
    )
    theirs = build_megatron(paths, (num_train, 8, 0), seed=3, split="80,20,0")
    assert_same_samples(ours, theirs[0])
    assert_same_samples(valid, theirs[1])


def test_paths_per_split_equal_megatron(tmp_path, prefixes):
    own = [["2", prefixes[0], "1", prefixes[1]], ["3", prefixes[2]], None]
    ours = build_ours(
        (200, 40, 0),
        seed=11,
        tmp_path=tmp_path,
        train_data_path=own[0],
        valid_data_path=own[1],
    )
    theirs = build_megatron(None, (200, 40, 0), seed=11, own_paths=own)
    assert_same_samples(ours[0], theirs[0])
    assert_same_samples(ours[1], theirs[1])


def test_eod_loss_mask_and_reset_positions_equal_megatron(tmp_path, prefixes):
    flags = {"eod_mask_loss": True, "reset_position_ids": True}
    ours, _, _ = build_ours((50, 0, 0), seed=3, tmp_path=tmp_path, data_path=prefixes[:1], **flags)
    theirs = build_megatron(prefixes[:1], (50, 1, 0), seed=3, **flags)[0]
    assert_same_samples(ours, theirs)
    assert any((sample["loss_mask"] == 0).any() for sample in map(ours.__getitem__, range(50)))


def test_kept_partial_validation_sample_equals_megatron(tmp_path, prefixes):
    seed = 17  # used once: Megatron's cache does not tell this flag apart
    ours = build_ours(
        (20, 4, 0),
        seed=seed,
        tmp_path=tmp_path,
        data_path=prefixes[:1],
        split="80,20,0",
        drop_last_partial_validation_sequence=False,
    )[1]
    theirs = build_megatron(
        prefixes[:1],
        (20, 4, 0),
        seed=seed,
        split="80,20,0",
        drop_last_partial_validation_sequence=False,
    )[1]
    assert_same_samples(ours, theirs)
    assert sum((ours[i]["loss_mask"] == 0).any() for i in range(len(ours))) == 1


def test_pad_equal_to_eod_keeps_every_real_target(tmp_path, prefixes):
    """Padding is known by its position: Megatron masks by value."""
    tokenizer = NullTokenizer(VOCAB)
    tokenizer.pad = tokenizer.eod
    train, valid, _ = build_ours(
        (20, 4, 0),
        seed=3,
        tmp_path=tmp_path,
        tokenizer=tokenizer,
        data_path=prefixes[:1],
        split="80,20,0",
        drop_last_partial_validation_sequence=False,
    )
    samples = [train[i] for i in range(len(train))]
    assert sum(int((sample["labels"] == EOD).sum()) for sample in samples) > 10
    assert all(sample["loss_mask"].all() for sample in samples)
    for sample in map(valid.__getitem__, range(len(valid))):
        real = int(sample["loss_mask"].sum())
        assert sample["loss_mask"][:real].all()
        assert not sample["labels"][real:].any()


def test_sample_index_equals_megatrons_helper_on_random_lengths():
    rng = np.random.RandomState(0)
    for trial in range(30):
        lengths = rng.randint(0, rng.choice([3, 20, 200]), rng.randint(5, 60)).astype(np.int32)
        lengths[-1] += 2
        plan = plan_samples(
            int(lengths.sum()), num_samples=None, seq_length=int(rng.randint(2, 30))
        )
        documents = np.arange(len(lengths), dtype=np.int32)
        expected = megatron_helpers.build_sample_idx(
            lengths, documents, plan.seq_length, 1, plan.tokens_per_epoch
        )
        np.testing.assert_array_equal(build_sample_index(lengths, plan), expected, str(trial))


@pytest.mark.parametrize("num_datasets", [1, 2, 3, 17])
def test_blend_index_equals_megatrons_helper(num_datasets):
    rng = np.random.RandomState(num_datasets)
    for weights in (
        rng.rand(num_datasets) + 0.01,
        np.ones(num_datasets),
        1 + rng.randint(0, 9, num_datasets),
    ):
        for size in (1, 7, 5000):
            shares = normalize(weights)
            dataset, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
            megatron_helpers.build_blending_indices(
                dataset, sample, np.array(shares), num_datasets, size, False
            )
            index = build_blend_index(shares, size)
            np.testing.assert_array_equal(index["dataset_index"], dataset)
            np.testing.assert_array_equal(index["dataset_sample_index"], sample)


@pytest.mark.parametrize("split", ["969,30,1", "99,1,0", "1", "0,1,2", "98.5,1,0.5"])
def test_split_bounds_equal_megatrons(split):
    expected = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    assert split_bounds(split) == expected


@pytest.mark.parametrize("path", [["a"], ["a", "b"], ["1", "a"], ["0.3", "a", "7", "b"]])
def test_data_path_is_read_as_megatron_reads_it(path):
    assert parse_blend(path) == tuple(get_blend_from_list(path))


@pytest.mark.parametrize(
    "path", [[], ["1", "a", "b"], ["a", "1"], ["1", "a", "x", "b"], ["0", "a"]]
)
def test_unclear_data_path_is_refused(path):
    with pytest.raises(ValueError, match="--data-path"):
        parse_blend(path)


def test_blend_without_weights_goes_on_after_one_epoch(tmp_path, prefixes):
    short, _, _ = build_ours((60, 0, 0), seed=3, tmp_path=tmp_path, data_path=prefixes)
    long, _, _ = build_ours((1000, 0, 0), seed=3, tmp_path=tmp_path, data_path=prefixes)
    assert (len(short), len(long)) == (60, 1000)
    assert len({long[i]["sample_id"] for i in range(1000)}) == 1000  # epochs have ids of their own


def test_extendable_order_of_a_longer_run_begins_with_the_shorter_ones(tmp_path, prefixes):
    for paths in (prefixes[:1], ["1", prefixes[0], "2", prefixes[1]]):
        runs = [
            build_ours(
                (n, 0, 0), seed=3, tmp_path=tmp_path, data_path=paths, data_order="extendable"
            )[0]
            for n in (100, 900)
        ]
        ids = [[run[i]["sample_id"] for i in range(100)] for run in runs]
        assert ids[0] == ids[1]
        np.testing.assert_array_equal(runs[0][99]["tokens"], runs[1][99]["tokens"])
        assert order_digest(runs[0]) == order_digest(runs[1])


def test_extendable_order_draws_each_sample_of_an_epoch_once(tmp_path, prefixes):
    train, _, _ = build_ours(
        (200, 0, 0), seed=3, tmp_path=tmp_path, data_path=prefixes[:1], data_order="extendable"
    )
    assert sorted(train[i]["sample_id"] for i in range(len(train))) == list(range(len(train)))
    first = [train[i]["sample_id"] for i in range(40)]
    assert max(first) < 80
    assert first != sorted(first)


def test_order_digest_tells_what_changes_the_order(tmp_path, prefixes):
    def digest(num_samples=50, **changes):
        options = {"seed": 3, "tmp_path": tmp_path, "data_path": prefixes[:1]} | changes
        return order_digest(build_ours((num_samples, 0, 0), **options)[0])

    assert digest() == digest(num_samples=60)  # same epoch
    others = [
        digest(num_samples=500),
        digest(seed=4),
        digest(seq_length=SEQ_LENGTH + 1),
        digest(split="50,50,0"),
        digest(data_path=prefixes[1:2]),
    ]
    assert len({digest(), *others}) == 6


def test_mock_data_is_the_same_everywhere_and_follows_its_rule():
    tokenizer = NullTokenizer(50)

    def build():
        return build_datasets(
            DataConfig(mock_data=True),
            tokenizer=tokenizer,
            seq_length=32,
            num_samples=(100, 10, 10),
            seed=1,
        )

    for first, second in zip(build(), build(), strict=True):
        np.testing.assert_array_equal(first[3]["tokens"], second[3]["tokens"])
    source = MockTokens(vocab_size=tokenizer.vocab_size, eod=tokenizer.eod)
    document = source.get(17)
    assert len(document) == source.sequence_lengths[17]
    assert document[-1] == tokenizer.eod
    assert len(set(((document[1:-1] - document[:-2]) % 50).tolist())) == 1
    np.testing.assert_array_equal(source.get(17, 5, 4), document[5:9])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of"),
        ({"mock_data": True, "data_path": ["a"]}, "exactly one of"),
        ({"data_path": ["nowhere"]}, r"nowhere\.idx does not exist"),
        ({"mock_data": True, "split": "1,x"}, "--split '1,x'"),
        ({"mock_data": True, "split": "0,1"}, "no training data"),
        ({"valid_data_path": ["a"]}, "no training data"),
    ],
)
def test_contradicting_data_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_datasets(
            DataConfig(**options),
            tokenizer=NullTokenizer(VOCAB),
            seq_length=8,
            num_samples=(10, 0, 0),
            seed=1,
        )


def test_split_without_documents_is_refused_with_numbers(tmp_path, prefixes):
    with pytest.raises(ValueError, match=r"test split takes sequences 40\.\.40 of the 40"):
        build_ours((5, 0, 5), seed=1, tmp_path=tmp_path, data_path=prefixes[:1], split="999,0,1")


def test_files_of_another_tokenizer_are_refused(tmp_path):
    with IndexedDatasetWriter(tmp_path / "data", dtype=np.uint16) as writer:
        writer.add_document(range(90))
    write_provenance(tmp_path / "data", {"tokenizer": NullTokenizer(90).identity()})
    options = {"seed": 1, "tmp_path": tmp_path, "data_path": [str(tmp_path / "data")], "split": "1"}
    build_ours((5, 0, 0), tokenizer=NullTokenizer(90), **options)
    with pytest.raises(ValueError, match="was tokenized by"):
        build_ours((5, 0, 0), tokenizer=NullTokenizer(91), **options)


def test_index_needs_no_compiler(tmp_path, prefixes, monkeypatch):
    """Megatron compiles C++ on first use; with no tool on the path ours builds all the same."""
    monkeypatch.setenv("PATH", "")
    train, _, _ = build_ours((100, 0, 0), seed=3, tmp_path=tmp_path, data_path=prefixes)
    assert len(train) == 100
