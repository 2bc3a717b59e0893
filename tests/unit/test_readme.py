"""README's figures are those of the result files."""

import copy

import pytest

from tools.bench.all import BENCHMARKS
from tools.bench.readme import (
    BEGIN,
    END,
    PLOTS,
    README,
    RESULTS,
    ROWS,
    existing_plots,
    read_results,
    rendered,
    section,
)

MACHINE = {
    "device": "CPU Z80 (1 threads)", "cores": 2, "memory_gib": 4.0, "cpu_capability": "AVX9",
    "native_bf16_gemm": False,
}  # fmt: skip
VERSIONS = {"torch": "9", "megatron-core": "8"}


def result(summary: dict, rows: list[dict] | None = None, command: str = "python -m x") -> dict:
    return {
        "command": command, "machine": MACHINE, "versions": VERSIONS,
        "rows": rows or [{"a": 1}], "summary": summary,
    }  # fmt: skip


def test_readme_and_the_result_files_agree():
    text = README.read_text(encoding="utf-8")
    assert rendered(text, read_results(), plots=existing_plots()) == text, (
        "README's figures are not those of tools/bench/results: python -m tools.bench.all --render"
    )


def test_a_changed_result_is_noticed():
    results = read_results()
    changed = copy.deepcopy(results)
    changed["lossless"]["summary"]["tokens_compared"] += 1
    assert section(changed) != section(results)


def test_every_published_result_is_shown_or_made_by_a_known_benchmark():
    shown = {row.result for row in ROWS} | {name for name, _ in PLOTS}
    for path in RESULTS.glob("*.json"):
        assert path.stem in shown, f"{path.name} has no row in README"
    assert set(BENCHMARKS) <= shown


def test_one_command_runs_every_benchmark():
    files = [path for path in RESULTS.parent.glob("*.py") if " write_result(" in path.read_text()]
    modules = {f"tools.bench.{path.stem}" for path in files} - {"tools.bench.common"}
    assert modules - {"tools.bench.est_curve"} <= {b.module for b in BENCHMARKS.values()}
    assert BENCHMARKS["est_curve"].full[0] == "curve"  # it runs as a part of tools.bench.est


def test_rows_appear_with_their_figures_and_not_without():
    full = section({"rl": result({"cores": 2, "vs_trl": 3.5, "max_logprob_diff": 1e-6},
                                 [_rl_row("ours", 1.0)])})  # fmt: skip
    assert "| RL on 2 cores, time for each generated token, TRL's over ours | 3.50x | `python -m x` |" in full
    assert "1.0e-06 | same |" in full and "quickstart" not in full
    assert "| ours | 3 | 1.00 | 1.00 | 1.00 | 1.00 | 64 |" in full
    nothing = section({"rollout": result({"vs_sglang_min": None}, [_rollout_row()])})
    assert "SGLang" not in nothing


def test_a_cluster_is_a_table_by_ranks_and_an_interval_a_pair():
    row = {"kind": "cluster", "policy": "tlt", "sharing": "queue"}
    rows = [row | {"ranks": n, "rollout_speedup": n / 4} for n in (64, 8)]
    text = section({"cluster_replay": result({"validation_error": 0.031}, rows),
                    "tlt": result({"tlt_paired": 1.4, "tlt_interval": [1.25, 1.5]})})  # fmt: skip
    assert "| tlt, queue | 2.00x | 16.00x |" in text and "| 3.1% |" in text
    assert "| 1.40x, 1.25x to 1.50x |" in text


def _rl_row(name: str, seconds: float) -> dict:
    times = dict.fromkeys(("step_s", "generate_s", "reward_s", "train_s"), seconds)
    return {"name": name, "steps": 3, "mean_tokens": 64.0} | times


def _rollout_row() -> dict:
    return {
        "model": "small", "batch": 1, "parameters": 2e7, "off_vs_transformers": {"fp32": 3.0},
        "ngram_vs_off": 1.5, "eagle_vs_off": None, "bandit_vs_off": 1.1,
    }  # fmt: skip


def test_machines_are_named_once_and_exceptions_by_result():
    other = result({"kills": 1}) | {"machine": MACHINE | {"cores": 8}}
    text = section({"a": result({}), "b": result({}), "c": other})
    assert text.startswith("2 cores of Z80 (AVX9, without native bf16 GEMMs), 4.0 GiB, torch 9")
    assert "`c`: 8 cores" in text


def test_commands_carry_no_folder_of_a_machine():
    command = "python -m tools.bench.rl --output /a/b --trl-python /c/python --steps 3"
    text = section({"rl": result({"quickstart_s": 9}, [_rl_row("ours", 1.0)], command)})
    assert "`python -m tools.bench.rl --trl-python PATH --steps 3`" in text


def test_readme_without_markers_is_refused():
    with pytest.raises(ValueError, match="measured"):
        rendered("nothing here", {})
    assert rendered(f"a{BEGIN}old{END}b", {"a": result({})}).endswith(f"{END}b")
