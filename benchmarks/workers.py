"""Another process that runs cases in its turn, and times them itself: of another environment, or
another revision.

Of the standard library alone: the other environment may have nothing that this one has.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


SHORTEST = 0.1
"""Seconds that a turn takes at least: what is shorter runs several times."""


def mean_seconds(run: Callable[[], object]) -> float:
    """Seconds of a run, over as many as one turn needs."""
    start, num_runs, seconds = time.perf_counter(), 0, 0.0
    while seconds < SHORTEST:
        run()
        num_runs += 1
        seconds = time.perf_counter() - start
    return seconds / num_runs


class Worker:
    """A process that runs `serve`; a context manager.

    Args:
        module: what is run, as ``python -m module`` in the root of the repository.
        python: the interpreter.
        environment: of the process.

    Attributes:
        process: its pipes are the lines to it and from it.
    """

    def __init__(
        self,
        module: str,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = [python, "-m", *module.split()]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    def seconds(self, case: str) -> float:
        """What a case takes; what it needs is made before, when it is asked for first.

        Raises:
            RuntimeError: it failed, or the process ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        # it has ended already, as what it imports is not in its environment
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{case}\n")
            self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline() or '{"error": "the process has ended"}')
        if "error" in answer:
            raise RuntimeError(f"{case}: {answer['error']}")
        return float(answer["seconds"])

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.communicate()  # it ends where its input ends


def serve(make: Callable[[str], Callable[[], object]]) -> None:
    """Answer for each case that is read what it takes to run; its things are kept until another one
    is asked for.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # what is printed in between is no answer
    ready: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        case = line.rstrip("\n")
        try:
            if case not in ready:
                ready = {}
                ready = {case: make(case)}
            answer: dict[str, Any] = {"seconds": mean_seconds(ready[case])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
