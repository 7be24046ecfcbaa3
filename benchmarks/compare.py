"""This tree beside another revision: two processes take turns, in one run.

    make bench-compare BASE=<revision>   or   python -m benchmarks.compare REVISION [--only
    'TwoNN*'] [--rounds 9]

The revision's ``src`` is extracted into a temporary folder; the cases are those of this tree.
Printed is the revision's time ÷ this tree's: above 1, this tree is faster.
"""

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from benchmarks.timing import Line, arguments_parser, report, take_turns
from benchmarks.workers import ROOT, Worker, serve


def compared(base: str, only: str, rounds: int) -> Iterator[Line]:
    """A line for each case that the revision can run, too."""
    from benchmarks.estimators import cases

    with tempfile.TemporaryDirectory() as folder:
        extract(base, Path(folder))
        with worker(ROOT) as this, worker(Path(folder)) as other:
            for case in (case for case in cases() if fnmatch(case, only)):
                sides = {
                    "embedgeo": partial(this.seconds, case),
                    base: partial(other.seconds, case),
                }
                try:
                    yield Line(case, take_turns(sides, rounds))
                except RuntimeError as error:
                    print(f"\nleft out: {error}")


def extract(base: str, folder: Path) -> None:
    """Write a revision's ``src`` into a folder.

    Raises:
        SystemExit: there is no such revision, or it has none.
    """
    archived = subprocess.run(
        ["git", "archive", base, "--", "src"], check=False, cwd=ROOT, capture_output=True
    )
    if archived.returncode:
        said = archived.stderr.decode().strip().removeprefix("fatal: ")
        sys.exit(
            f"BASE must be a git revision with a folder src, such as main; got {base!r} ({said})."
        )
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as files:
        files.extractall(folder, filter="data")


def worker(tree: Path) -> Worker:
    return Worker(
        "benchmarks.compare --worker", environment={**os.environ, "PYTHONPATH": str(tree / "src")}
    )


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("base", metavar="REVISION")
    parser.add_argument("--only", default="*", help="cases whose name fits this pattern")
    parser.add_argument("--rounds", type=int, default=9)
    arguments: argparse.Namespace = parser.parse_args()
    report(compared(arguments.base, arguments.only, arguments.rounds), arguments.json)


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        from benchmarks.estimators import cases

        serve(lambda case: cases()[case]())
    else:
        main()
