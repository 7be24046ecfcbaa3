import pytest

from embedgeo import log_spaced_steps
from embedgeo.training.monitor import Schedule


def test_log_spaced_steps_are_pythias():
    assert log_spaced_steps() == (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@pytest.mark.parametrize(
    ("last_step", "step", "is_due"),
    [(-1, 0, True), (0, 1, True), (1, 4, False), (4, 6, True), (6, 7, False)],
)
def test_a_step_is_due_once_also_where_steps_are_passed_over(last_step, step, is_due):
    assert (Schedule(5, extra_steps=(1,)).next_after(last_step) <= step) == is_due


def test_the_next_step_is_an_extra_or_a_regular_one():
    schedule = Schedule(100, extra_steps=(0, 1, 2, 100))
    assert [schedule.next_after(step) for step in (-1, 1, 2, 100)] == [0, 2, 100, 200]
    assert (str(Schedule(100)), str(schedule)) == ("every 100 steps", "every 100 steps and at 1, 2")
    assert str(Schedule(1, extra_steps=(3,))) == "every step"
