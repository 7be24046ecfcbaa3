"""A checkpoint and a measurement beside other work: one busy process a processor, as data loaders
are.

    python -m benchmarks.busy [--rounds N] [--json FILE]

Printed is how many times as long each takes beside the busy processes, and that divided by what a
forward pass with one thread slows down. Sides take turns alone and beside them, each in a process
of its own environment; the processor time tells of threads that spin, also on a machine where
nothing is ever alone.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import GPTNeoXConfig, GPTNeoXModel

from benchmarks.rows import Still, zipf_tokens
from benchmarks.timing import arguments_parser, duration, report, spread
from benchmarks.workers import Worker, serve
from embedgeo.geometry import Geometry

LAYERS, WIDTH, VOCABULARY = 6, 128, 2048  # those of the demo's model
SHAPE = 8, 256
SIDES: dict[str, tuple[str, dict[str, str]]] = {
    "a forward pass, one thread": ("forward", {"OMP_NUM_THREADS": "1"}),
    "a checkpoint, as commands run": ("checkpoint", {"OMP_WAIT_POLICY": "PASSIVE"}),
    "a measurement in training": ("measurement", {}),
}
"""Case and environment of each side; the first is what the others are divided by."""


@dataclass
class Slowdown:
    """Seconds alone and beside busy processes, and the slowdown ÷ that of a forward pass with one
    thread.
    """

    name: str
    alone: list[float]
    beside: list[float]
    ratios: list[float]
    at_most: float

    def as_dict(self) -> dict[str, Any]:
        found = spread(self.ratios)
        return {
            "kind": "slowdown",
            **asdict(self),
            "ratio": found,
            "holds": found["median"] <= self.at_most,
        }

    def __str__(self) -> str:
        alone, beside, ratio = (
            float(np.median(each)) for each in (self.alone, self.beside, self.ratios)
        )
        times = f"{duration(alone)} alone, {duration(beside)} beside busy processes"
        return (
            f"{self.name}: {times}; slowdown ÷ a forward pass's {ratio:.2f}, at most "
            f"{self.at_most:g}"
        )


def slowdowns(rounds: int) -> Iterator[Slowdown]:
    with ExitStack() as stack:
        sides = {
            name: partial(stack.enter_context(process(environment)).seconds, case)
            for name, (case, environment) in SIDES.items()
        }
        alone, beside = ({name: list[float]() for name in sides} for _ in range(2))
        for i in range(rounds + 1):
            for num_busy, seconds in ((0, alone), (os.cpu_count() or 1, beside)):
                with busy(num_busy):
                    for name, side in sides.items():
                        found = side()
                        seconds[name] += [found] if i else []
    slower = {name: np.divide(beside[name], alone[name]) for name in sides}
    forward, *others = sides
    for name in others:
        yield Slowdown(
            name, alone[name], beside[name], (slower[name] / slower[forward]).tolist(), 1.25
        )


def process(environment: Mapping[str, str]) -> Worker:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMP_", "GOMP_", "KMP_"))
    }
    return Worker("benchmarks.busy --worker", environment={**kept, **environment})


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Context beside so many processes that never wait."""
    processes = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)
    ]
    try:
        time.sleep(0.3)
        yield
    finally:
        for each in processes:
            each.kill()
            each.wait()


def case(name: str) -> Callable[[], object]:
    torch.manual_seed(0)
    tokens = zipf_tokens(*SHAPE, num_types=VOCABULARY)
    size = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 4 * WIDTH}
    model = GPTNeoXModel(GPTNeoXConfig(vocab_size=VOCABULARY, num_attention_heads=4, **size)).eval()
    still = Still(torch.randn(*SHAPE, WIDTH), LAYERS, VOCABULARY)
    measured, layers = (model, "blocks") if name == "checkpoint" else (still, "blocks.*")

    @torch.inference_mode()
    def forward() -> None:
        model(tokens)

    @torch.inference_mode()
    def measurement() -> None:
        geometry = Geometry(measured, layers)
        with geometry.probe:
            measured(tokens)
        geometry.records()

    return forward if name == "forward" else measurement


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    report(slowdowns(arguments.rounds), arguments.json)


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        serve(case)
    else:
        main()
