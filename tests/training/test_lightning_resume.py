"""Training that goes on from a checkpoint: between windows, inside one, with and without the
monitor before.
"""

from embedgeo import GeometryMonitor
from tests.training.runs import (
    OPTIONS,
    RESUMED,
    Manual,
    interrupted,
    n_at,
    steps,
)

pytestmark = RESUMED


def monitor_of(window=1, **options):
    defaults = {"every_n_steps": 3, "measure_last": False, **OPTIONS}
    return GeometryMonitor(**{**defaults, "window": window, **options})


def test_what_a_checkpoint_cuts_is_taken_up_again_by_each_monitor(tmp_path):
    first, second, added = monitor_of(3), monitor_of(3), monitor_of(2, prefix="added")
    others = [monitor_of(every_n_steps=5, prefix="other") for _ in range(2)]
    interrupted(tmp_path, [first, others[0]], [added, others[1], second], at=4)
    assert n_at(first) == {0: 3 * 48, 3: 48}
    assert n_at(second) == {3: 2 * 48, 6: 3 * 48}
    assert steps(others[1]) == [5]
    assert n_at(added) == {6: 2 * 48}


def test_a_window_that_has_become_shorter_is_not_taken_up(tmp_path):
    second = monitor_of()
    interrupted(tmp_path, [monitor_of(window=3)], [second], at=5, end=7)
    assert steps(second) == [6]


def test_a_step_that_two_optimizers_pass_by_is_not_lost_between_two_runs(tmp_path):
    first, second = monitor_of(every_n_steps=5), monitor_of(every_n_steps=5)
    interrupted(tmp_path, [first], [second], at=6, end=10, make=lambda: Manual(optimizers=2))
    assert steps(first) == [0]
    assert steps(second) == [6]
