"""What a report costs over 154 checkpoints x 33 layers with all that can be measured: seconds,
memory, page size.

python -m benchmarks.report
"""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from embedgeo.glossary import known_terms
from embedgeo.report import write_report
from tests.report.synthetic import PYTHIA_STEPS, make_sweep

WIDTH, BLOCKS = 2560, 31
OF_OTHERS = {"loss", "tokens_seen"}  # the model's


def main() -> None:
    if len(sys.argv) > 1:  # in a process of its own, so that its peak is the report's
        start, used = time.perf_counter(), time.process_time()
        page = write_report([Path(sys.argv[1])])
        seconds, peak = (
            time.perf_counter() - start,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
        used = time.process_time() - used
        files = [path for path in page.parent.rglob("*") if path.is_file()]
        num_figures = len([path for path in files if path.suffix == ".svg"])
        print(
            f"report over {len(PYTHIA_STEPS)} checkpoints, {num_figures} figures: {seconds:.1f} s "
            f"(promised: 20)"
        )
        print(f"  of a processor: {used:.1f} s")
        print(f"  peak memory, with torch loaded: {peak / 1e6:.0f} MB (promised: 1074)")
        print(
            f"  page: {page.stat().st_size / 1e6:.1f} MB (promised: 5), all files "
            f"{sum_bytes(files) / 1e6:.1f} MB"
        )
        return
    with tempfile.TemporaryDirectory() as name:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.report", make_folder(Path(name) / "sweep")],
            check=True,
        )


def make_folder(folder: Path) -> Path:
    """A sweep with every metric of the glossary."""
    metrics = [metric for metric in known_terms() if metric not in OF_OTHERS]
    make_sweep(folder, PYTHIA_STEPS, BLOCKS, dim=WIDTH, metrics=metrics)
    return folder


def sum_bytes(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)


if __name__ == "__main__":
    main()
