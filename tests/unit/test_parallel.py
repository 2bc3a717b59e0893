"""Process groups: layouts that cannot be are refused, and setting up again leaves nothing behind."""

import gc
import threading

import psutil
import pytest

from megatron_tlt.parallel import ParallelConfig, init_parallel


def threads() -> int:
    gc.collect()
    return psutil.Process().num_threads()


def test_setting_up_again_and_again_does_not_pile_up_threads():
    init_parallel(ParallelConfig(), seed=1)
    init_parallel(ParallelConfig(), seed=1)
    before = threads()
    for _ in range(5):
        init_parallel(ParallelConfig(), seed=1)
    assert threads() <= before + 2
    assert threading.active_count() < 20


@pytest.mark.parametrize(
    "fields,words",
    [
        ({"tensor_model_parallel_size": 0}, ("tensor_model_parallel_size=0",)),
        ({"context_parallel_size": 2}, ("context_parallel_size", "2", "not supported")),
        ({"expert_model_parallel_size": 4}, ("expert_model_parallel_size", "4", "not supported")),
        ({"sequence_parallel": True}, ("tensor_model_parallel_size > 1, got 1",)),
        ({"virtual_pipeline_model_parallel_size": 2}, ("=2", "pipeline_model_parallel_size > 1, got 1")),
        ({"overlap_p2p_comm": True}, ("interleaved",)),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
             "batch_p2p_comm": True},
            ("batch_p2p_comm=True",),
        ),
    ],
)  # fmt: skip
def test_a_layout_that_is_wrong_or_not_supported_is_refused_by_name(fields, words):
    with pytest.raises(ValueError) as error:
        ParallelConfig(**fields)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_interleaved_schedule_gets_the_only_right_communication_by_itself():
    config = ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (True, False)


def test_a_world_that_holds_no_whole_replicas_is_refused_with_the_numbers():
    config = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert config.data_parallel_size(8) == 2
    with pytest.raises(ValueError, match="6 ranks .* 4 ranks each: start a multiple of 4"):
        config.data_parallel_size(6)
