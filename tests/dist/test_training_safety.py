"""Training: what is not finite, padded, tied or missing on one rank never harms the run silently."""

import math
import os
import subprocess
import sys

import pytest

from megatron_tlt.parallel import init_parallel
from megatron_tlt.train.pretrain import NonFiniteError, pretrain
from megatron_tlt.train.setup import build_run
from megatron_tlt.train.step import train_step
from tests.dist.runs import PP2, TP2, largest_difference, read_metrics, run_config, steps, train
from tests.dist.workers import free_port, run_distributed

import torch


def build(log_dir, preset="tiny-gpt2", **sections):
    torch.set_num_threads(1)
    config = run_config(log_dir, preset=preset, **sections)
    return build_run(config, init_parallel(config.parallel, seed=config.training.seed))


def poisoned_run(log_dir, sections, bad_rank, bad_steps):
    """Gradients of `bad_rank` become infinite in some steps; returns what the run came to."""
    run = build(log_dir, **sections)
    weight = run.model[0].embedding.word_embeddings.weight
    before = weight.detach().clone()
    calls = iter(range(1000))

    def poison(grad):
        micro_batches = 2
        bad = next(calls) // micro_batches in bad_steps and run.parallel.rank == bad_rank
        return grad * math.inf if bad else grad

    # Weight gradients are added to main_grad inside the GEMM, so the poison goes into what flows back.
    def poison_output(module, inputs, output):
        if output.requires_grad:
            output.register_hook(poison)

    run.model[0].decoder.final_layernorm.register_forward_hook(poison_output)
    try:
        pretrain(run)
        outcome = "finished"
    except NonFiniteError as error:
        outcome = str(error)
    state = run.state
    return {
        "outcome": outcome,
        "iteration": state.iteration,
        "unchanged": torch.equal(weight, before),
        "finite": bool(weight.isfinite().all()),
        "skipped": state.skipped_iterations,
        "nan_grad_norms": state.nan_grad_norms,
        "nan_iterations": state.nan_iterations,
        "schedule": run.scheduler.num_steps,
    }


@pytest.mark.parametrize("bf16", [False, True])
def test_an_infinite_gradient_on_one_rank_stops_all_before_the_update(bf16, tmp_path):
    sections = {"training": {"bf16": bf16}}
    results = run_distributed(poisoned_run, 2, tmp_path, sections, 1, {0})
    for result in results:
        assert "iteration 1: loss" in result["outcome"] and "stop" in result["outcome"]
        assert result["unchanged"] and result["nan_grad_norms"] == 1 and result["iteration"] == 1
    assert results[0] == results[1]
    (line,) = read_metrics(tmp_path)  # the bad step is logged, although the run ended there
    assert line["grad-norm"] in ("inf", "nan") and line["nan-grad-norms"] == 1


def test_skipping_leaves_the_weights_and_the_schedule_alone_and_goes_on(tmp_path):
    sections = {"training": {"nonfinite_policy": "skip"}}
    results = run_distributed(poisoned_run, 2, tmp_path, sections, 0, {1, 2})
    for result in results:
        assert result["outcome"] == "finished" and result["finite"]
        assert (result["iteration"], result["skipped"], result["nan_grad_norms"]) == (6, 2, 2)
        assert result["nan_iterations"] == 0  # the losses of these steps were finite
        assert result["schedule"] == 4 * 8


def test_skipping_ends_after_the_allowed_number_in_a_row(tmp_path):
    sections = {"training": {"nonfinite_policy": "skip", "max_skipped_iterations": 2}}
    result = poisoned_run(tmp_path, sections, 0, set(range(6)))
    assert "3 times in a row" in result["outcome"]
    assert result["iteration"] == 3 and result["unchanged"]


def test_a_nan_loss_is_logged_as_nan_and_counted(tmp_path, capsys):
    run = build(tmp_path)
    run.model[0].decoder.final_layernorm.weight.data.fill_(math.nan)
    with pytest.raises(NonFiniteError, match="loss nan"):
        pretrain(run)
    assert "lm loss: NAN" in capsys.readouterr().out
    assert read_metrics(tmp_path)[0]["nan-iterations"] == 1


def tied_copies(log_dir, sections):
    """Train, then return this stage's copy of the tied table."""
    run = build(log_dir, **sections)
    pretrain(run)
    return run.model[0].shared_embedding_or_output_weight().detach()


def test_tied_embeddings_stay_bit_equal_on_first_and_last_stage(tmp_path):
    first, last = run_distributed(tied_copies, 2, tmp_path, {"parallel": PP2})
    assert torch.equal(first, last)


def test_padding_of_the_vocabulary_changes_neither_loss_nor_gradient_norm(tmp_path):
    for name, multiple in (("padded", 512), ("exact", 1)):
        train(tmp_path / name, "tiny-llama", {"model": {"make_vocab_size_divisible_by": multiple}})
    assert largest_difference(steps(tmp_path / "padded"), steps(tmp_path / "exact")) < 1e-5
    run_distributed(train, 2, tmp_path / "tp", "tiny-llama", {"parallel": TP2})
    assert largest_difference(steps(tmp_path / "tp"), steps(tmp_path / "exact")) < 1e-5


def step_with_masks(log_dir, masked):
    """One step over 2 samples in all; those in `masked` carry no loss. Returns (loss, norm, tokens)."""
    run = build(log_dir)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 257, (2, 65), generator=generator)
    mask = torch.ones(2, 64)
    mask[masked] = 0.0
    per_rank = 2 // run.parallel.dp_size
    rows = range(run.parallel.dp_rank * per_rank, (run.parallel.dp_rank + 1) * per_rank)
    batches = [
        {
            "tokens": tokens[i : i + 1, :-1],
            "labels": tokens[i : i + 1, 1:],
            "loss_mask": mask[i : i + 1],
            "position_ids": torch.arange(64)[None],
        }
        for i in rows
    ]
    result = train_step(run.chunks, run.optimizer, batches, parallel=run.parallel)
    return result.loss, result.grad_norm, result.num_tokens


@pytest.mark.parametrize("masked", [[], [1]])
def test_a_rank_without_a_single_counted_token_takes_part_and_changes_nothing(masked, tmp_path):
    alone = step_with_masks(tmp_path, masked)
    for shared in run_distributed(step_with_masks, 2, tmp_path, masked):
        assert shared == pytest.approx(alone, abs=1e-5)
    assert alone[2] == 64 * (2 - len(masked))


def test_a_batch_without_any_counted_token_gives_zero_and_no_nan(tmp_path):
    assert step_with_masks(tmp_path, [0, 1]) == (0.0, 0.0, 0)


def test_one_ranks_bad_input_ends_all_ranks_promptly_with_its_message(tmp_path):
    """The second rank sees another data path that does not exist, as a node without the disk would."""
    program = tmp_path / "one_bad_rank.py"
    program.write_text(
        "import os, sys\n"
        "from megatron_tlt.pretrain import main\n"
        "bad = ['--data.train_data_path', '[\"missing/tokens\"]', '--data.mock_data=false']\n"
        "sys.exit(main(sys.argv[1:] + (bad if os.environ['RANK'] == '1' else [])))\n"
    )
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
        f"--master_port={free_port()}", str(program), "--model.preset=tiny-gpt2",
        "--training.train_iters=3", "--training.global_batch_size=4", "--data.mock_data=true",
        f"--logging.log_dir={tmp_path}",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=environment, cwd=os.getcwd()
    )
    assert done.returncode != 0
    assert "error: [rank 1]" in done.stderr and "missing/tokens" in done.stderr
