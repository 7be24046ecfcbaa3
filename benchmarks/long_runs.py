"""A long run: what the n-th measurement of a tiny model takes, and what memory and files grow by.

    python -m benchmarks.long_runs [--measurements 100 1000 10000] [--json FILE]

Measured at every step, with TensorBoard's scalars, charts and pictures, and the history file.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from benchmarks.steps import Loop, Shape
from benchmarks.timing import arguments_parser, duration, report

MEASUREMENTS = 100, 1_000, 10_000
TINY = Shape("1 layer of width 16, 2 × 32 tokens", 1, 16, (2, 32), heads=2, vocabulary=512)
"""Its measurements have as many records a layer as a large model's, in little time."""


@dataclass
class Growth:
    """What there is after a number of measurements.

    Args:
        measurements: the number.
        records: in the history.
        seconds: of a step and its measurement: the median of the last ones, a tenth of all.
        slowest: the longest of these.
        resident: bytes of the process's memory.
        history_file: bytes.
        event_files: bytes.
    """

    measurements: int
    records: int
    seconds: float
    slowest: float
    resident: int
    history_file: int
    event_files: int

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "growth", **asdict(self)}

    def __str__(self) -> str:
        sizes = {
            "process": self.resident,
            "history file": self.history_file,
            "event files": self.event_files,
        }
        said = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items())
        times = f"{duration(self.seconds)} each (up to {duration(self.slowest)})"
        return f"{self.measurements:,} measurements, {self.records:,} records: {times}; {said}"


def growth(measurements: Sequence[int] = MEASUREMENTS, shape: Shape = TINY) -> Iterator[Growth]:
    with tempfile.TemporaryDirectory() as name, SummaryWriter(name) as writer:
        loop = Loop(shape, options={"log": writer})
        assert loop.monitor is not None
        seconds: list[float] = []
        for i in range(1, max(measurements) + 1):
            start = time.perf_counter()
            loop.measured()
            seconds.append(time.perf_counter() - start)
            if i in measurements:
                writer.flush()
                last = seconds[-max(1, i // 10) :]
                sizes = (
                    resident_bytes(),
                    *(sum_bytes(Path(name), each) for each in ("history*", "**/events*")),
                )
                yield Growth(
                    i, len(loop.monitor.history), float(np.median(last)), max(last), *sizes
                )
        loop.monitor.close()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def sum_bytes(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern))


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--measurements", type=int, nargs="+", default=MEASUREMENTS)
    arguments = parser.parse_args()
    report(growth(arguments.measurements), arguments.json)


if __name__ == "__main__":
    main()
