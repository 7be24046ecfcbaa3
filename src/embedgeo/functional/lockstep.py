"""Exchanges between ranks that go on side by side."""

from collections.abc import Generator
from typing import Any, Protocol, TypeVar


class Question(Protocol):
    """Something that a generator yields, to which it is given an answer before it goes on."""

    answer: Any  # None: not yet


Q = TypeVar("Q", bound=Question)


def at_once(*generators: Generator[list[Q], None, Any]) -> Generator[list[Q], None, list[Any]]:
    """Results of several generators that go on side by side."""
    results: list[Any] = [None] * len(generators)
    waiting: dict[int, list[Q]] = {number: [] for number in range(len(generators))}
    while True:
        for number, questions in [*waiting.items()]:
            if not questions or any(question.answer is not None for question in questions):
                try:
                    waiting[number] = next(generators[number])
                except StopIteration as end:
                    results[number] = end.value
                    del waiting[number]
        if not waiting:
            return results
        yield [
            question
            for questions in waiting.values()
            for question in questions
            if question.answer is None
        ]
