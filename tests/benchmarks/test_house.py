"""The size of the project, and how many of its functions a measured step runs: a tenth above what was reached.

A change that needs more raises the figure, and says why.
"""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

import embedgeo
from benchmarks.calls import besides_functional, by_module, measured_step, way_of_a_number

FILES, LINES = 120, 31_700
"""Python files of the package and their lines, at most.

Lines were 23,082 before exchanges that survive the failure of a rank, and dimensions by token type and sequence; 23,172
before updates that wait for no device, exchanges of all layers together, and a search that serves several dimensions;
24,311 before values of layers are computed together, and extra metrics update without waits; 25,600 before weights are
read by ranges and compared over a run, and earlier runs stand behind the curves of a report; 26,300 before the residual
ledger, which finds the writes of a block, and divides its moments between them; 26,900 before hidden
states are replaced to see what the loss needs; 27,400 before computations that fail for one layer leave those beside it
alone; 27,600 before writes of a block are layers, and a report draws who writes what; 27,900 before the claims of
papers are set beside what is measured; 28,800 before token types may be strings, and their means are kept; 29,100
before a page has the numbers of its figures, from which a script draws them again; 29,350 before a run's numbers are
tested against their own past; 29,800 before a report tells in words what happened; 30,100 before the spread of cosines,
the logit lens, plots for papers, and presets and examples that a wheel has; 31,000 before errors of changes are paired
by sequence, and help and messages name options and packages as they are written.
"""
FUNCTIONS, MODULES = 148, 20
"""Besides `embedgeo.functional`, that one measured step runs, at most.

They were 117 before values of several kinds, 120 before exchanges of all layers together, 124 before layers were
computed side by side, 128 before the norms inside of blocks were run in one operation and looked at together, and 137
before a metric of token types dropped those of all ranks with its rows; of one tree, 138 were met on one machine
and 140 on another; at most 144 and 146.
"""
WAY = 25
"""Calls that a number takes from the hook on a layer to the logger, at most.

They were 22 before layers were computed side by side, which needs someone to go from one to the other.
"""


def test_the_package_has_no_more_files_and_lines():
    files = [*Path(embedgeo.__file__).parent.rglob("*.py")]
    assert len(files) <= FILES
    assert sum(len(file.read_text().splitlines()) for file in files) <= LINES


def counted():
    step = measured_step()
    return besides_functional(by_module(step.functions)), way_of_a_number(step)


@pytest.fixture(scope="module")
def step():
    """Counted in a process of its own, in which no earlier test has left anything that may run."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(counted).result()


@pytest.mark.slow
def test_a_measured_step_runs_no_more_functions_and_modules(step):
    modules, _ = step
    assert sum(map(len, modules.values())) <= FUNCTIONS
    assert len(modules) <= MODULES
    assert "training/lightning.py" in modules


@pytest.mark.slow
def test_a_number_takes_no_more_calls(step):
    _, way = step
    assert way[-1].startswith("training/lightning.py")
    assert len(way) <= WAY
