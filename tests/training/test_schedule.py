from embedgeo import log_spaced_steps
from embedgeo.training.monitor import Schedule


def test_log_spaced_steps_are_pythias():
    assert log_spaced_steps() == (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def test_the_next_step_is_an_extra_or_a_regular_one():
    schedule = Schedule(100, extra_steps=(0, 1, 2, 100))
    assert [schedule.next_after(step) for step in (-1, 1, 2, 99, 100)] == [0, 2, 100, 100, 200]
    assert (str(Schedule(100)), str(schedule)) == ("every 100 steps", "every 100 steps and at 1, 2")
    assert str(Schedule(1, extra_steps=(3,))) == "every step"
