"""What the design promises, as ratios of sides that take turns in one run: some five minutes.

make bench   or   python -m benchmarks.bench [--json FILE]
"""

from collections.abc import Iterator

import torch

from benchmarks import estimators, steps
from benchmarks.timing import Record, arguments_parser, report


def promises(rounds: int) -> Iterator[Record]:
    """The estimators beside their peers, and a measured step of each shape beside a plain one."""
    yield from estimators.all_twonn(rounds)
    for n, d in (1024, 768), (4096, 768), (4096, 2048), (8192, 512):
        yield estimators.twonn_beside_a_product(n, d, rounds)
    yield estimators.labelled(4096, 768, rounds)
    yield estimators.anisotropies(4096, 768, rounds)
    yield estimators.token_tables(65_536, 768, rounds)
    yield estimators.updates((8, 512), 512, 8, rounds)
    yield steps.eager(steps.SHAPE_70M, 1.06, max(3, rounds // 2))
    yield steps.eager(steps.SHAPE_12, 1.08, max(3, rounds // 2))


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report(promises(arguments.rounds), arguments.json)


if __name__ == "__main__":
    main()
