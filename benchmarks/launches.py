"""What a measurement asks of a GPU: launches, waits, copies to the device and bytes to the host.

python -m benchmarks.launches                      # some ten minutes; it needs g++, and no GPU:
nothing is timed python -m benchmarks.launches --only "default metrics"

`tests/pretended.py` counts, on a device that is not there, and says what counts. A GPT-NeoX of
width 64 reads 8 sequences of up to 256 tokens, a fifth of which is padding; what it asks for alone
is taken off.

- An update is a forward pass of all layers, from the attached hooks to the detached ones; values
  are computed after it.
- A further layer is a quarter of what 8 blocks ask for more than 4.
- A measurement is the third one of a `StepMonitor` with a probe, with all that belongs to it.
- Each metric alone has a share in what several use together; the shares add up to more than the
  whole.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from transformers import GPTNeoXConfig, GPTNeoXModel

from benchmarks.timing import arguments_parser, report
from embedgeo import (
    Anisotropy,
    IntrinsicDimension,
    StepMonitor,
    TokenMoments,
    default_metrics,
    full_metrics,
    observe,
)
from embedgeo.metrics.defaults import EXTRA_METRICS
from tests.pretended import Asked, Count, pretended

NUM_BLOCKS = 4, 8
METRICS: dict[str, Callable[[int], list[Metric]]] = {
    "default metrics": default_metrics,
    **{
        kind.__name__: lambda dim, kind=kind: [kind(dim)]
        for kind in (TokenMoments, Anisotropy, IntrinsicDimension)
    },
    **{name: lambda dim, make=make: [make(dim, 0)] for name, make in EXTRA_METRICS.items()},
    "all metrics": full_metrics,
}
MONITORS: dict[str, dict[str, Any]] = {
    "default metrics": {},
    "in the background": {"background": True},
    "jackknife": {"jackknife": 4},
    "drift": {"drift": True},
    "all metrics, jackknife and drift": {"metrics": full_metrics, "jackknife": 4, "drift": True},
}
LIMITS = {
    "default metrics: an update of a further layer": Asked(80, 0, 0, 0),
    "default metrics: values of a further layer": Asked(150, 0, 0, 400_000),
    "default metrics: values of 10 layers": Asked(1500, 4, 10, 4_000_000),
    "default metrics: a measurement of 10 layers": Asked(2500, 8, 10, 4_000_000),
    "jackknife: a further layer of a measurement": Asked(1200, 0, 0, 1_000_000),
    "drift: a further layer of a measurement": Asked(800, 0, 0, 1_000_000),
    "all metrics, jackknife and drift: a further layer of a measurement": Asked(
        6000, 0, 0, 10_000_000
    ),
}
"""What stages may ask for at most."""


@dataclass
class Stage:
    """What a part of a measurement asks for."""

    name: str
    asked: Asked

    @property
    def limit(self) -> Asked | None:
        return LIMITS.get(self.name)

    @property
    def holds(self) -> bool:
        return self.limit is None or all(
            a <= b for a, b in zip(self.asked, self.limit, strict=True)
        )

    def as_dict(self) -> dict[str, Any]:
        limit = None if self.limit is None else self.limit._asdict()
        return {
            "kind": "stage",
            "name": self.name,
            "asked": self.asked._asdict(),
            "limit": limit,
            "holds": self.holds,
        }

    def __str__(self) -> str:
        given = [
            f"{value:,.10g} {name.replace('_', ' ')}"
            for name, value in self.asked._asdict().items()
        ]
        goal = (
            ""
            if self.limit is None
            else f"\n    at most {', '.join(f'{each:,}' for each in self.limit)}"
        )
        return f"{self.name}\n    {', '.join(given)}{goal}{'' if self.holds else ': does not hold'}"


@dataclass
class Rows:
    """Rows of a layer that are measured, and the products in which TwoNN takes their distances."""

    rows: int
    products: float

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "rows", "rows": self.rows, "products": self.products}

    def __str__(self) -> str:
        return (
            f"{self.rows:,} rows a layer, whose distances are taken in {self.products:g} products"
        )


def model(num_blocks: int) -> nn.Module:
    torch.manual_seed(0)
    size = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": num_blocks,
    }
    use = {"use_cache": False, "attn_implementation": "eager"}  # others are kernels of one device
    config = GPTNeoXConfig(vocab_size=1000, max_position_embeddings=256, **size, **use)
    return GPTNeoXModel(config).eval().to("cuda")


def batch() -> dict[str, Tensor]:
    """Token ids and mask of 8 × 256 tokens, a fifth of them padding."""
    ids = torch.randint(1000, (8, 256), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(256) < torch.linspace(154, 256, 8)[:, None]
    return {"input_ids": ids.to("cuda"), "attention_mask": mask.long().to("cuda")}


def less(left: Asked, right: Asked) -> Asked:
    return Asked(*(a - b for a, b in zip(left, right, strict=True)))


@torch.no_grad()
def forward(count: Count, num_blocks: int) -> Asked:
    """What the model asks for alone."""
    run, given = model(num_blocks), batch()
    count.clear()
    run(**given)
    return count.asked()


@torch.no_grad()
def observed(
    count: Count, num_blocks: int, make: Callable[[int], list[Metric]]
) -> tuple[Asked, Asked, Rows]:
    """What the update and the values of all layers ask for; what is counted last are the values."""
    run, given, alone = model(num_blocks), batch(), forward(count, num_blocks)
    count.clear()
    with observe(run, metrics=make) as geometry:
        run(**given)
    update = less(count.asked(), alone)
    count.clear()
    values = geometry.compute()
    products = [
        number
        for place, number in count.launches.items()
        if place.startswith("functional/neighbors")
        and place.split("aten.")[1].startswith(("mm.", "bmm.", "baddbmm."))
    ]
    return (
        update,
        count.asked(),
        Rows(int(given["attention_mask"].sum()), sum(products) / len(values)),
    )


@torch.no_grad()
def monitored(count: Count, num_blocks: int, options: dict[str, Any]) -> Asked:
    """What a further measurement of a probe asks for, all told."""
    run, given = model(num_blocks), batch()
    asked = []
    for num_steps in (2, 3):
        count.clear()
        with StepMonitor(
            run, 1, probe=[given], on_error="raise", measure_last=False, **options
        ) as monitor:
            for step in range(num_steps):
                with monitor.step(step):
                    pass
        asked.append(count.asked())
    return less(less(asked[1], asked[0]), forward(count, num_blocks))


def further(more: Asked, fewer: Asked, num_layers: int) -> Asked:
    """What each of so many layers asks for that one of two models has more."""
    return Asked(*(each / num_layers for each in less(more, fewer)))


def of_metrics(
    count: Count, name: str, num_blocks: tuple[int, int] = NUM_BLOCKS
) -> Iterator[Stage | Rows]:
    """Update and values of a set of metrics: a further layer, and all layers of the larger of two
    models.
    """
    (fewer_update, fewer_values, _), (update, values, rows) = (
        observed(count, n, METRICS[name]) for n in num_blocks
    )
    num_layers = num_blocks[1] - num_blocks[0]
    yield rows
    yield Stage(f"{name}: an update of a further layer", further(update, fewer_update, num_layers))
    yield Stage(f"{name}: an update of {num_blocks[1] + 2} layers", update)
    yield Stage(f"{name}: values of a further layer", further(values, fewer_values, num_layers))
    yield Stage(f"{name}: values of {num_blocks[1] + 2} layers", values)


def of_measurement(
    count: Count, name: str, num_blocks: tuple[int, int] = NUM_BLOCKS
) -> Iterator[Stage]:
    """Measurements of a monitor, in the same way."""
    fewer, asked = (monitored(count, n, MONITORS[name]) for n in num_blocks)
    yield Stage(
        f"{name}: a further layer of a measurement",
        further(asked, fewer, num_blocks[1] - num_blocks[0]),
    )
    yield Stage(f"{name}: a measurement of {num_blocks[1] + 2} layers", asked)


def main(arguments: list[str] | None = None) -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument(
        "--only", default="", choices=sorted({*METRICS, *MONITORS}), help="this set of metrics"
    )
    given = parser.parse_args(arguments)
    with pretended() as count:
        metrics = (of_metrics(count, name) for name in METRICS if given.only in ("", name))
        monitors = (of_measurement(count, name) for name in MONITORS if given.only in ("", name))
        report(chain.from_iterable(chain(metrics, monitors)), given.json)


if __name__ == "__main__":
    main()
