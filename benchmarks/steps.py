"""A training step that is measured beside one that is not, eager and compiled."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters
from torchmetrics import Metric

from benchmarks.rows import zipf_tokens
from benchmarks.timing import Line, clocked, spread, take_turns
from embedgeo import Anisotropy, IntrinsicDimension, StepMonitor, TokenMoments, default_metrics
from embedgeo.metrics.layer import MetricFactory


@dataclass(frozen=True)
class Shape:
    """Of a GPT-NeoX, and of its batches."""

    name: str
    layers: int
    width: int
    batch: tuple[int, int]
    heads: int = 8
    vocabulary: int = 50_304


SHAPE_70M = Shape("Pythia-70m's shape, 8 × 512 tokens", 6, 512, (8, 512))
SHAPE_12 = Shape("12 layers of width 768, 4 × 512 tokens", 12, 768, (4, 512), heads=12)
DEMO = Shape("6 layers of width 128, 8 × 128 tokens", 6, 128, (8, 128), heads=4, vocabulary=4096)
SMALL = Shape("2 layers of width 64, 4 × 64 tokens", 2, 64, (4, 64), heads=2, vocabulary=512)


class Loop:
    """A training loop of a model of its own.

    Args:
        shape: of the model.
        backend: of torch.compile; None: eager.
        options: of a `embedgeo.StepMonitor` that measures every second step; None: there is none.
    """

    def __init__(
        self, shape: Shape, backend: str | None = None, options: dict[str, Any] | None = None
    ) -> None:
        torch.manual_seed(0)
        size = {
            "hidden_size": shape.width,
            "num_hidden_layers": shape.layers,
            "intermediate_size": 4 * shape.width,
        }
        config = transformers.GPTNeoXConfig(
            vocab_size=shape.vocabulary,
            num_attention_heads=shape.heads,
            max_position_embeddings=2048,
            **size,
        )
        self.forward = self.model = transformers.GPTNeoXForCausalLM(config).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = zipf_tokens(*shape.batch, num_types=shape.vocabulary)
        self.monitor = None if options is None else self.monitored(**options)
        if backend is not None:
            self.forward = torch.compile(self.model, backend=backend, isolate_recompiles=True)

    def monitored(self, **options: Any) -> StepMonitor:
        self.last_step = 0  # the last even step
        return StepMonitor(
            self.model, every_n_steps=2, on_error="raise", measure_last=False, **options
        )

    def plain(self) -> None:
        """A step, of which the monitor is not told."""
        self._step(nullcontext())

    def measured(self) -> None:
        assert self.monitor is not None
        self.last_step += 2
        self._step(self.monitor.step(self.last_step))

    def other(self) -> None:
        """A step that the monitor leaves out."""
        assert self.monitor is not None
        self._step(self.monitor.step(self.last_step + 1))

    def _step(self, context: AbstractContextManager[None]) -> None:
        with context:
            self.forward(input_ids=self.tokens, labels=self.tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass
class Runs:
    """Ratios of several runs, each the median of its rounds."""

    name: str
    ratios: list[float]
    median_at_most: float
    at_most: float

    def as_dict(self) -> dict[str, Any]:
        found = spread(self.ratios)
        holds = found["median"] <= self.median_at_most and found["max"] <= self.at_most
        return {"kind": "runs", **asdict(self), "ratio": found, "holds": holds}

    def __str__(self) -> str:
        found = spread(self.ratios)
        limits = f"at most {self.median_at_most:g} and {self.at_most:g}"
        return (
            f"{self.name}: {found['n']} runs, median {found['median']:.3f}, largest "
            f"{found['max']:.3f}; {limits}"
        )


def eager(shape: Shape, at_most: float | None, rounds: int) -> Line:
    """Measured ÷ plain step, of the same model."""
    loop = Loop(shape, options={})
    seconds = take_turns({"plain": clocked(loop.plain), "measured": clocked(loop.measured)}, rounds)
    return Line(
        f"measured ÷ plain step, {shape.name}", seconds, "measured", "plain", at_most=at_most
    )


class Nothing(Metric):
    """A metric of no rows, so that what is timed are the hooks, the ids, the records and their
    log.
    """

    def update(self, embeddings: Tensor) -> None:
        """Leave the rows alone."""

    def compute(self) -> dict[str, Tensor]:
        return {}


def parts(shape: Shape, rounds: int) -> Iterator[Line]:
    """Steps measured by one metric of the default ones at a time, and by none, ÷ plain step."""
    makers: dict[str, MetricFactory] = {
        "nothing": lambda dim: [Nothing()],
        "TokenMoments": lambda dim: [TokenMoments(dim)],
        "Anisotropy": lambda dim: [Anisotropy(dim)],
        "IntrinsicDimension": lambda dim: [IntrinsicDimension(dim)],
        "all of them": default_metrics,
    }
    sides = {name: Loop(shape, options={"metrics": make}).measured for name, make in makers.items()}
    plain = Loop(shape).plain
    seconds = take_turns(
        {name: clocked(side) for name, side in {"plain": plain, **sides}.items()}, rounds
    )
    for name in sides:
        yield Line(f"step measured by {name} ÷ plain step, {shape.name}", seconds, name, "plain")


def eager_runs(
    shape: Shape, median_at_most: float, at_most: float, runs: int, rounds: int
) -> Iterator[Line | Runs]:
    """Several runs; the limits are those of their median, and of each."""
    ratios = []
    for _ in range(runs):
        yield (line := eager(shape, at_most, rounds))
        ratios.append(float(np.median(line.ratios)))
    yield Runs(f"measured ÷ plain step, {shape.name}", ratios, median_at_most, at_most)


@dataclass
class Graphs:
    """What torch.compile made in 100 steps, half of them measured, beside what it makes without a
    monitor.
    """

    name: str
    without: dict[str, int]
    with_monitor: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "graphs", **asdict(self), "holds": self.without == self.with_monitor}

    def __str__(self) -> str:
        said = (
            ", ".join(f"{n} {what}" for what, n in each.items())
            for each in (self.without, self.with_monitor)
        )
        return f"{self.name}: without a monitor {' | with it '.join(said)}"


def graphs(shape: Shape = SMALL, steps: int = 100, backend: str = "aot_eager") -> Graphs:
    found = []
    for options in (None, dict[str, Any]()):
        torch._dynamo.reset()
        counters.clear()
        loop = Loop(shape, backend, options)
        for i in range(steps):
            (loop.plain if options is None else loop.other if i % 2 else loop.measured)()
        breaks = Counter[str](counters["graph_break"]).total()
        found.append({"graphs": counters["stats"]["unique_graphs"], "breaks": breaks})
    torch._dynamo.reset()
    return Graphs(f"graphs of {steps} steps, half of them measured, {shape.name}", *found)
