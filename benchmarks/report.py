"""What a report costs over 154 checkpoints x 33 layers x 12 metrics: seconds, peak memory, and size of the page.

python -m benchmarks.report
"""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.report.synthetic import METRICS, PYTHIA_STEPS, make_sweep

WIDTH = 2560


def main() -> None:
    if len(sys.argv) > 1:  # in a process of its own, so that its peak is the report's
        from embedgeo.report import write_report

        start = time.perf_counter()
        page = write_report([Path(sys.argv[1])])
        seconds, peak = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        files = [path for path in page.parent.rglob("*") if path.is_file()]
        num_figures = len([path for path in files if path.suffix == ".svg"])
        print(f"report over {len(PYTHIA_STEPS)} checkpoints, {num_figures} figures: {seconds:.1f} s (promised: 20)")
        print(f"  peak memory, with torch loaded: {peak / 1e6:.0f} MB (promised: 1074)")
        print(f"  page: {page.stat().st_size / 1e6:.1f} MB (promised: 5), all files {sum_bytes(files) / 1e6:.1f} MB")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = make_sweep(Path(name) / "sweep", PYTHIA_STEPS, 31, dim=WIDTH, metrics=METRICS[:12], tokens=True)
        subprocess.run([sys.executable, "-m", "benchmarks.report", folder], check=True)


def sum_bytes(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)


if __name__ == "__main__":
    main()
