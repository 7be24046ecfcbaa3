"""What the ranks of a run exchange in one measured step: collectives and bytes, with 2 and 4 gloo
ranks.

python -m benchmarks.communication            # some minutes: 14 layers of width 768, 2,048 rows a
rank, default metrics

All that a `StepMonitor` exchanges counts, that ranks tell each other that they have come among it.
Bytes are those a rank sends in a ring: 2 (R - 1) / R times what it gives to a reduction. Those with
1,024 ranks are extrapolated: only the rows of the token tables grow, with the token types that any
rank has seen, and 104 bytes a layer and rank. Nothing is timed.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.rows import VOCABULARY, Still, gaussian, zipf_tokens
from benchmarks.timing import arguments_parser, report
from embedgeo import StepMonitor
from tests.ranks import on_two_ranks

RANKS, MANY = (2, 4), 1024
AT_MOST = 16  # collectives of a measured step
AT_A_TIME = 1 << 29  # bytes; what is more takes two collectives for as many
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast")


@dataclass
class Traffic:
    """Collectives of one measured step, and the bytes that a rank sends in them."""

    name: str
    ranks: int
    calls: int
    megabytes: float
    is_extrapolated: bool = False

    @property
    def at_most(self) -> int:
        return AT_MOST + more_calls(self.megabytes, self.ranks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": "traffic",
            **asdict(self),
            "at_most": self.at_most,
            "holds": self.calls <= self.at_most,
        }

    def __str__(self) -> str:
        how = ", extrapolated" if self.is_extrapolated else ""
        return (
            f"{self.name}, {self.ranks} ranks: {self.calls} collectives, {self.megabytes:.1f} "
            f"MB{how}"
        )


def more_calls(megabytes: float, ranks: int) -> int:
    """Collectives that so many bytes, sent by a rank, take more than few ones."""
    given = megabytes * ranks / (2 * (ranks - 1))
    return 2 * int(1e6 * given / AT_A_TIME)


def measured_step(
    rank: int, num_layers: int, width: int, num_rows: int, options: dict[str, Any]
) -> list[float]:
    """Bytes that a rank sends in each collective of the third measured step."""
    tokens = zipf_tokens(dist.get_world_size(), num_rows // 256 or 1, min(num_rows, 256))[rank]
    model = Still(gaussian(num_rows, width).view(*tokens.shape, width) + rank, num_layers)
    sizes = list[float]()
    others = dist.get_world_size() - 1

    def counted(collective: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = max(each.nbytes for each in args if isinstance(each, torch.Tensor))
            share = 2 / (others + 1) if collective.__name__ == "all_reduce" else 1
            sizes.append(given * share * others)
            return collective(*args, **kwargs)

        return call

    options = {
        "layers": "blocks.*",
        "measure_last": False,
        "on_error": "raise",
        **options,
    }
    monitor = StepMonitor(model, 1, **options)
    for step in range(3):
        with mock.patch.multiple(
            dist, **{name: counted(getattr(dist, name)) for name in COLLECTIVES}
        ):
            sizes.clear()
            with monitor.step(step):
                model(tokens)
    monitor.close()
    return sizes


def traffic(
    ranks: int, num_layers: int = 14, width: int = 768, num_rows: int = 2048, **options: Any
) -> Traffic:
    """That of so many gloo ranks, each of which has so many rows at every layer; ``options`` are
    the monitor's.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = num_layers, width, num_rows, options
        sizes, *_ = on_two_ranks(measured_step, Path(folder), *given, seconds=600, world_size=ranks)
    name = f"{num_layers} layers of width {width}, {num_rows} rows a rank"
    return Traffic(name, ranks, len(sizes), sum(sizes) / 1e6)


def extrapolated(
    last: Traffic, num_layers: int = 14, width: int = 768, num_rows: int = 2048
) -> Traffic:
    """The traffic of 1,024 ranks, from that of fewer: token types are more, and what each rank says
    of itself.
    """
    few, many = num_types(num_rows * np.array([last.ranks, MANY]))
    shares = 2 * (MANY - 1) / MANY, 2 * (last.ranks - 1) / last.ranks
    of_types = (many - few) * num_layers * 8 * (width + 5)
    of_ranks = (MANY - last.ranks) * num_layers * 8 * 13
    megabytes = (last.megabytes / shares[1] + (of_types + of_ranks) / 1e6) * shares[0]
    calls = last.calls - more_calls(last.megabytes, last.ranks) + more_calls(megabytes, MANY)
    return Traffic(last.name, MANY, calls, megabytes, is_extrapolated=True)


def num_types(num_rows: np.ndarray) -> np.ndarray:
    """Expected number of token types among so many of `zipf_tokens`."""
    weights = 1 / np.arange(1, VOCABULARY + 1) ** 1.07
    shares = weights / weights.sum()
    return (1 - (1 - shares) ** num_rows[:, None]).sum(1)


def all_traffic() -> Iterator[Traffic]:
    """That of each number of ranks, in turn, and of 1,024."""
    for ranks in RANKS:
        found = traffic(ranks)
        yield found
    yield extrapolated(found)


def main() -> None:
    arguments = arguments_parser(__doc__).parse_args()
    report(all_traffic(), arguments.json)


if __name__ == "__main__":
    main()
