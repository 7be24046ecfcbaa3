"""Everything that is timed on a CPU, beside what `benchmarks/sweep.py` and the other scripts time:
an hour or so.

    make bench-full   or   python -m benchmarks.full [--only peers steps compiled scaling long]
    [--json FILE]

`benchmarks/README.md` says what each part does, and what the JSON holds.
"""

from collections.abc import Callable, Iterator

import torch

from benchmarks import estimators, long_runs, scaling, steps
from benchmarks.timing import Record, arguments_parser, report


def peers() -> Iterator[Record]:
    yield from estimators.all_twonn(rounds=11)
    for n, d in (1024, 768), (4096, 768), (4096, 2048), (8192, 512):
        yield estimators.twonn_beside_a_product(n, d, rounds=11)
    yield estimators.labelled(4096, 768, rounds=11)
    yield from estimators.published(rounds=3)
    yield estimators.anisotropies(4096, 768, rounds=11)
    yield estimators.token_tables(65_536, 768, rounds=11)
    yield estimators.few_rows(256, 64, rounds=51)
    yield from estimators.engines([(4096, 512), (2048, 768), (2048, 4096)], rounds=5)
    yield estimators.updates((8, 512), 512, 8, rounds=11)
    yield estimators.updates((4, 512), 768, 14, rounds=11)


def training_steps() -> Iterator[Record]:
    yield from steps.eager_runs(steps.SHAPE_70M, 1.06, 1.12, runs=9, rounds=3)
    yield steps.eager(steps.SHAPE_12, 1.08, rounds=7)
    yield steps.eager(steps.DEMO, 1.8, rounds=11)
    yield steps.eager(steps.SMALL, 4.0, rounds=21)
    yield from steps.parts(steps.SMALL, rounds=11)


def compiled() -> Iterator[Record]:
    yield steps.graphs(backend="inductor")


PARTS: dict[str, Callable[[], Iterator[Record]]] = {
    "peers": peers,
    "steps": training_steps,
    "compiled": compiled,
    "scaling": lambda: scaling.slopes(rounds=5),
    "long": long_runs.growth,
}


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report((record for part in arguments.only for record in PARTS[part]()), arguments.json)


if __name__ == "__main__":
    main()
