"""The global batch size over a run, against megatron-core's calculators."""

import pytest

from megatron_tlt.train.batch_size import build_batch_schedule

from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator


def build(final, rampup=None, micro=1, dp=1):
    return build_batch_schedule(final, rampup, micro_batch_size=micro, data_parallel_size=dp)


@pytest.mark.parametrize("final,rampup", [(16, [4, 4, 300]), (32, [8, 8, 100]), (8, [8, 8, 50])])
def test_ramp_equals_megatrons_calculator(final, rampup):
    ours = build(final, rampup, micro=2, dp=2)
    if final == rampup[0]:  # megatron divides by zero increments
        assert [ours(c) for c in (0, 10, 1000)] == [final] * 3
        return
    theirs = RampupBatchsizeNumMicroBatchesCalculator(
        rank=1,
        global_batch_size=final,
        micro_batch_size=2,
        data_parallel_size=2,
        decrease_batch_size_if_needed=False,
        start_global_batch_size=rampup[0],
        batch_size_increment=rampup[1],
        ramup_samples=rampup[2],
    )
    for consumed in range(0, 2 * rampup[2], 4):
        theirs.update(consumed, consistency_check=True)
        assert ours(consumed) == theirs.get_current_global_batch_size()


def test_samples_after_is_the_sum_of_the_batch_sizes():
    ours = build(16, [4, 4, 300])
    consumed = 0
    for iterations in range(80):
        assert ours.samples_after(iterations) == consumed
        consumed += ours(consumed)


@pytest.mark.parametrize(
    "final,rampup,micro,dp,numbers",
    [
        (10, None, 4, 1, ("10", "4")),
        (8, None, 1, 3, ("8", "3")),
        (16, [4, 5, 100], 1, 1, ("4", "16", "5")),
        (16, [4, 4], 1, 1, ("three",)),
        (16, [32, 4, 10], 1, 1, ("32", "16")),
        (16, [4, 4, 0], 1, 1, ("0",)),
        (16, [2, 2, 100], 4, 1, ("2", "4")),
    ],
)
def test_batch_sizes_that_do_not_divide_are_refused_with_the_numbers(
    final, rampup, micro, dp, numbers
):
    with pytest.raises(ValueError) as error:
        build(final, rampup, micro=micro, dp=dp)
    assert all(number in str(error.value) for number in numbers)
