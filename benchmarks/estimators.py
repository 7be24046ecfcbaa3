"""The estimators beside what others offer for the same numbers."""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch

from benchmarks import peers
from benchmarks.machine import floors
from benchmarks.rows import Measurement, gaussian, manifold, zipf_tokens
from benchmarks.timing import Line, clocked, take_turns
from embedgeo.functional import (
    RowLabels,
    anisotropy,
    labelled_dimensions,
    row_scatter,
    token_table,
    top_eigenvalue,
    two_nearest_distances,
    twonn_dimension,
)

TWONN = {
    (1024, 768): 1.0,
    (4096, 512): 2.0,
    (4096, 768): 2.0,
    (4096, 2048): 2.0,
    (16_384, 768): 2.0,
}
"""Rows and width, and how many times faster than the fastest peer TwoNN must be."""

ROWS = {"Gaussian": gaussian, "manifold": manifold}


def twonn(n: int, d: int, kind: str, rounds: int, at_least: float | None = None) -> Line:
    x = ROWS[kind](n, d)
    with peers.twonn_peers(x) as others:
        seconds = take_turns({"embedgeo": clocked(lambda: twonn_dimension(x)), **others}, rounds)
    return Line(
        f"TwoNN, {n:,} × {d}, {kind}", seconds, at_least=at_least, floors=floors(n, d, n * n * d)
    )


def all_twonn(rounds: int) -> Iterator[Line]:
    for (n, d), at_least in TWONN.items():
        for kind in ROWS:
            yield twonn(n, d, kind, max(3, rounds // 2) if n > 4096 else rounds, at_least)


def twonn_beside_a_product(n: int, d: int, rounds: int) -> Line:
    """TwoNN beside all products of the rows, of which it needs half, in the dtype that takes less
    time.
    """
    x = gaussian(n, d)
    sides = {"embedgeo": clocked(lambda: twonn_dimension(x))}
    for dtype in (torch.float32, torch.bfloat16):
        sides[f"product in {str(dtype).removeprefix('torch.')}"] = clocked(
            partial(product, x.to(dtype))
        )
    seconds = take_turns(sides, rounds)
    faster = min([*sides][1:], key=lambda side: median(seconds[side]))
    name = f"TwoNN, {n:,} × {d}, beside a product: 1.4 times half of it"
    return Line(name, seconds, over="embedgeo", under=faster, at_most=0.7)


def few_rows(n: int, d: int, rounds: int) -> Line:
    """The nearest two of few rows beside a search that is not exact."""
    x = gaussian(n, d)
    sides = {
        "embedgeo": clocked(partial(two_nearest_distances, x)),
        "cdist + topk": clocked(partial(peers.cdist_nearest, x)),
    }
    seconds = take_turns(sides, rounds)
    return Line(
        f"nearest two, {n:,} × {d}",
        seconds,
        over="embedgeo",
        under="cdist + topk",
        at_most=2.5,
    )


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ x.T


def labelled(n: int, d: int, rounds: int, num_sequences: int = 32) -> Line:
    """TwoNN of all rows, between and within Zipf distributed token types, and who their neighbours
    are.
    """
    x, types = gaussian(n, d), zipf_tokens(n)
    labels = RowLabels(types, torch.arange(n) * num_sequences // n)
    sides = {
        "all three": lambda: labelled_dimensions(x, labels),
        "TwoNN": lambda: twonn_dimension(x),
    }
    seconds = take_turns({name: clocked(side) for name, side in sides.items()}, rounds)
    name = f"between and within {len(types.unique()):,} token types, too, {n:,} × {d}"
    return Line(name, seconds, under="TwoNN", at_most=1.5)


def anisotropies(n: int, d: int, rounds: int) -> Line:
    x = gaussian(n, d)
    sides = {"embedgeo": lambda: anisotropy(x), "svdvals": lambda: peers.svd_anisotropy(x)}
    seconds = take_turns({name: clocked(side) for name, side in sides.items()}, rounds)
    return Line(f"anisotropy, {n:,} × {d}", seconds, floors=floors(n, d, n * d * d))


def token_tables(n: int, d: int, rounds: int) -> Line:
    x, tokens = gaussian(n, d), zipf_tokens(n)
    ids = tokens.tolist()
    sides = {
        "embedgeo": lambda: token_table(x, tokens),
        "per-token loop": lambda: peers.running_means(x, ids),
    }
    seconds = take_turns({name: clocked(side) for name, side in sides.items()}, rounds)
    return Line(f"token table, {n:,} × {d}", seconds, at_least=6, floors=floors(n, d, 0))


def engines(shapes: list[tuple[int, int]], rounds: int) -> Iterator[Line]:
    """The private engines beside the plain ways to their numbers, for so many rows of such
    widths.
    """

    def line(name: str, sides: dict[str, Callable[[], object]]) -> Line:
        return Line(name, take_turns({side: clocked(run) for side, run in sides.items()}, rounds))

    for n, d in shapes:
        x = gaussian(n, d)
        sides = {
            "embedgeo": partial(two_nearest_distances, x),
            "cdist + topk": partial(peers.cdist_nearest, x),
        }
        yield line(f"nearest two, {n:,} × {d}", sides)
        sides = {
            "embedgeo": partial(row_scatter, x),
            "whole product": partial(peers.whole_scatter, x),
        }
        yield line(f"scatter, {n:,} × {d}", sides)
        s = row_scatter(x).scatter
        sides = {
            "embedgeo": partial(top_eigenvalue, s),
            "eigvalsh": partial(torch.linalg.eigvalsh, s),
        }
        yield line(f"top eigenvalue, {d}, of Gaussian rows", sides)


def updates(batch: tuple[int, int], d: int, num_layers: int, rounds: int) -> Line:
    """An update of all default metrics, and what computing their values takes beside it."""
    measurement = Measurement(batch, d, num_layers)
    n, ids = measurement.token_ids.numel(), measurement.token_ids.flatten()
    x = gaussian(n, d)

    def plain_sums() -> None:
        for _ in range(num_layers):
            peers.plain_sums(x, ids)

    sides = {
        "embedgeo": measurement.update,
        "plain sums in torch": plain_sums,
        "their compute": measurement.compute,
    }
    seconds = take_turns({name: clocked(side) for name, side in sides.items()}, rounds)
    name = f"update of all default metrics, {num_layers} layers of {batch[0]} × {batch[1]} × {d}"
    lowest = floors(num_layers * n, d, num_layers * n * d * d)
    return Line(name, seconds, over="plain sums in torch", floors=lowest)


def published(rounds: int) -> Iterator[Line]:
    """The functions of llm-microscope, whose loop over points takes minutes for 4,096 rows."""
    x = gaussian(1024, 768)
    for name, ours, theirs in (
        (
            "TwoNN",
            lambda: twonn_dimension(x),
            partial(peers.llm_microscope("intrinsic_dimension"), x, "cpu"),
        ),
        (
            "anisotropy",
            lambda: anisotropy(x),
            partial(peers.llm_microscope("calculate_anisotropy_torch"), x),
        ),
    ):
        seconds = take_turns({"embedgeo": clocked(ours), "llm-microscope": clocked(theirs)}, rounds)
        yield Line(f"{name}, 1,024 × 768, llm-microscope", seconds)


def cases() -> dict[str, Callable[[], Callable[[], object]]]:
    """What one revision is compared with another by: by name, what makes the rows and gives what is
    timed.
    """

    def of_rows(
        function: Callable[..., object], rows: Callable[..., torch.Tensor], n: int, d: int
    ) -> partial[object]:
        return partial(function, rows(n, d))

    def dimensions(rows: Callable[..., torch.Tensor], n: int, d: int) -> partial[object]:
        labels = RowLabels(zipf_tokens(n), torch.arange(n) * 32 // n)
        return partial(labelled_dimensions, rows(n, d), labels)

    def computed(*size: int) -> Callable[[], object]:
        measurement = Measurement((8, 512), *size)
        measurement.update()
        return measurement.compute

    return {
        **{
            f"TwoNN, {n:,} × {d}, {kind}": partial(of_rows, twonn_dimension, rows, n, d)
            for n, d in TWONN
            for kind, rows in ROWS.items()
        },
        **{
            f"dimensions, {n:,} × {d}, {kind}": partial(dimensions, rows, n, d)
            for n, d in ((256, 64), (1024, 128), (4096, 768))
            for kind, rows in ROWS.items()
        },
        "anisotropy, 4,096 × 768": partial(of_rows, anisotropy, gaussian, 4096, 768),
        "token table, 65,536 × 768": lambda: partial(
            token_table, gaussian(65_536, 768), zipf_tokens(65_536)
        ),
        "update, 8 layers of 8 × 512 × 512": lambda: Measurement((8, 512), 512, 8).update,
        "update, 14 layers of 4 × 512 × 768": lambda: Measurement((4, 512), 768, 14).update,
        "compute, 8 layers of 8 × 512 × 512": partial(computed, 512, 8),
        "update, 1 layer of 2 × 16 × 32": lambda: Measurement((2, 16), 32).update,
    }
