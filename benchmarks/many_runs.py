"""What a report of many runs costs beside that of another revision, which takes its turn before it.

    python -m benchmarks.many_runs REVISION [--runs 10] [--checkpoints 100] [--json FILE]

The runs are of 13 layers and have every metric of the glossary, without standard errors.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare import extract
from benchmarks.report import OF_OTHERS, sum_bytes
from benchmarks.timing import arguments_parser, report
from benchmarks.workers import ROOT
from embedgeo.glossary import known_terms
from embedgeo.report import write_report
from tests.report.synthetic import make_sweep

BLOCKS, WIDTH = 11, 768


@dataclass
class Cost:
    """What a report costs.

    Args:
        side: the revision, or "embedgeo" for this tree.
        runs: in the report.
        checkpoints: of each of them.
        seconds: of a processor.
        resident: bytes of the process's memory at its peak.
        files: bytes of what the report's folder holds.
        figures: their number.
        ratios: seconds, resident and files over those of the other side; none of the first side.
    """

    side: str
    runs: int
    checkpoints: int
    seconds: float
    resident: int
    files: int
    figures: int
    ratios: tuple[float, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "report", **asdict(self)}

    def __str__(self) -> str:
        said = (
            f"{self.side}, {self.runs} runs of {self.checkpoints} checkpoints: "
            f"{self.figures} figures, {self.seconds:.1f} s of a processor, "
            f"{self.resident / 1e6:.0f} MB, a folder of {self.files / 1e6:.1f} MB"
        )
        beside = ", ".join(f"{ratio:.2f}" for ratio in self.ratios)
        return f"{said}; ÷ those of the other: {beside}" if beside else said


def costs(base: str, runs: int, checkpoints: int) -> Iterator[Cost]:
    metrics = [metric for metric in known_terms() if metric not in OF_OTHERS]
    steps = [100 * i for i in range(checkpoints)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for i in range(runs):
            make_sweep(folder / "runs" / f"run{i}", steps, BLOCKS, dim=WIDTH, metrics=metrics)
        extract(base, folder / "base")
        first = None
        for side, tree in ((base, folder / "base"), ("embedgeo", ROOT)):
            given = [folder / "runs", folder / side.replace("/", "-")]
            said = subprocess.run(
                [sys.executable, "-m", "benchmarks.many_runs", "--worker", *given],
                check=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(tree / "src")},
                stdout=subprocess.PIPE,
            ).stdout
            cost = Cost(side, runs, checkpoints, **json.loads(said))
            if first is not None:
                cost.ratios = (
                    cost.seconds / first.seconds,
                    cost.resident / first.resident,
                    cost.files / first.files,
                )
            first = cost
            yield cost


def work(runs: Path, out: Path) -> dict[str, float]:
    """Write a report in this process, and say what it has cost."""
    start = time.process_time()
    write_report(sorted(runs.iterdir()), out)
    seconds = time.process_time() - start
    return {
        "seconds": seconds,
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "files": sum_bytes([path for path in out.rglob("*") if path.is_file()]),
        "figures": len([*out.rglob("*.svg")]),
    }


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(work(*map(Path, sys.argv[2:]))))
        return
    parser = arguments_parser(__doc__)
    parser.add_argument("base", metavar="REVISION")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--checkpoints", type=int, default=100)
    arguments = parser.parse_args()
    report(costs(arguments.base, arguments.runs, arguments.checkpoints), arguments.json)


if __name__ == "__main__":
    main()
