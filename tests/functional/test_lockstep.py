"""Computations side by side: results, and which calls are made together."""

import pytest
import torch

from embedgeo.functional.lockstep import at_once, called, computed, on_host, steps, stepwise


def doubled(numbers):
    made.append(numbers)
    return [2 * number for number in numbers]


def doubled_by_steps(numbers):
    halves = yield from at_once(*(called(doubled, number / 2) for number in numbers))
    return [2 * half for half in halves]


made: list[list[float]] = []


@pytest.fixture(autouse=True)
def _nothing_made():
    made.clear()


def two_rounds(number):
    once = yield from called(doubled, number)
    return (yield from called(doubled, once + 1))


def test_calls_of_one_function_are_made_together():
    assert computed(at_once(*map(two_rounds, (1, 2, 3)))) == [6, 10, 14]
    assert made == [[1, 2, 3], [3, 5, 7]]


def test_a_function_may_be_a_computation_itself():
    found = computed(
        at_once(called(doubled_by_steps, 1.0), called(doubled_by_steps, 2.0), two_rounds(3.0))
    )
    assert found == [2.0, 4.0, 14.0]
    assert made == [[3.0], [7.0, 0.5, 1.0]]


def test_computations_of_different_lengths_end_each_with_its_own_result():
    def rounds(count):
        total = 0
        for _ in range(count):
            total += yield from called(doubled, 1)
        return total

    assert computed(at_once(*map(rounds, (0, 3, 1)))) == [0, 6, 2]
    assert [len(numbers) for numbers in made] == [2, 1, 1]


def test_no_calls_at_all():
    assert computed(at_once()) == []
    assert computed(on_host()) == ()


def test_tensors_on_the_cpu_stay_as_they_are():
    tensors = torch.ones(3), torch.tensor(2)
    assert all(a is b for a, b in zip(computed(on_host(*tensors)), tensors, strict=True))


@stepwise
def sum_of_doubled(*numbers):
    """Sum."""
    each = yield from at_once(*(called(doubled, number) for number in numbers))
    return sum(each)


def test_a_stepwise_function_is_called_like_any_other_or_goes_on_beside_others():
    assert sum_of_doubled(1, 2) == 6
    assert sum_of_doubled.__doc__ == "Sum."
    made.clear()
    assert computed(
        at_once(steps(sum_of_doubled, 1, 2), steps(sum_of_doubled, 3), steps(max, 1, 2))
    ) == [6, 6, 2]
    assert made == [[1, 2, 3]]


def test_an_exception_of_a_function_reaches_the_caller():
    def failing(numbers):
        raise ValueError(f"not {numbers[0]}")

    with pytest.raises(ValueError, match="not 1"):
        computed(at_once(called(failing, 1), called(failing, 2)))


def test_only_the_caller_whose_argument_a_function_fails_at_gets_the_exception():
    def roots(numbers):
        made.append(numbers)
        if min(numbers) < 0:
            raise ValueError(f"{min(numbers)} has no root")
        return [number**0.5 for number in numbers]

    def roots_by_steps(numbers):
        return (yield from at_once(*(called(roots, number) for number in numbers)))

    def guarded(function, number):
        try:
            return (yield from called(function, number))
        except ValueError as error:
            return str(error)

    for function in (roots, roots_by_steps):
        found = computed(at_once(*(guarded(function, number) for number in (4, -1, 9))))
        assert found == [2, "-1 has no root", 3]
    assert made[:4] == [[4, -1, 9], [4], [-1], [9]]
    with pytest.raises(ValueError, match="-1 has no root"):
        computed(at_once(called(roots, 4), called(roots_by_steps, -1)))


def test_an_exception_between_the_steps_of_a_function_reaches_its_caller_alone():
    def picky(numbers):
        half = yield from at_once(*(called(doubled, number / 4) for number in numbers))
        if max(half) > 5:
            raise ValueError("too large")
        return [2 * number for number in half]

    def guarded(number):
        try:
            return (yield from called(picky, number))
        except ValueError as error:
            return str(error)

    assert computed(at_once(*map(guarded, (1, 20, 3)))) == [1, "too large", 3]
