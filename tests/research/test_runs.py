"""Scripts that print tables, each run as a command with the smallest options that it has."""

import runpy
import sys

import pytest

RUNS = {
    "alarms": ("--runs 2 --series 3", "walk, t with 3"),
    "dropout": ("--max_steps 2 --num_sequences 4", "| final_norm |"),
    "sampling": ("--source simulated --draws 2 --largest 512", "| `intrinsic_dimension_within` |"),
    "within_token_variance": ("--seeds 2 --max_steps 2 --draws 2 --most 64", "| block.05, 32 "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_script_prints_its_tables(name, monkeypatch, printed):
    options, line = RUNS[name]
    monkeypatch.delitem(sys.modules, f"research.{name}", raising=False)
    monkeypatch.setattr(sys, "argv", [name, *options.split()])
    runpy.run_module(f"research.{name}", run_name="__main__")
    assert line in printed()
