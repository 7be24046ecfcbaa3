"""What `from embedgeo import GeometryMonitor` adds to the imports of Lightning and torch, each in a
new interpreter.

python -m benchmarks.imports
"""

import subprocess
import sys
from functools import partial

from benchmarks.timing import Line, arguments_parser, clocked, report, take_turns

PLAIN = "import lightning, torch"
SIDES = {"lightning and torch": PLAIN, "embedgeo": f"{PLAIN}; from embedgeo import GeometryMonitor"}


def imports(rounds: int) -> Line:
    """The ratio of both, with bytecode that an earlier run has left, as an installed package has
    it.
    """
    sides = {
        name: clocked(partial(subprocess.run, [sys.executable, "-c", code], check=True))
        for name, code in SIDES.items()
    }
    seconds = take_turns(sides, rounds)
    return Line(
        "imports with GeometryMonitor ÷ without",
        seconds,
        "embedgeo",
        "lightning and torch",
        at_most=1.1,
    )


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    report([imports(arguments.rounds)], arguments.json)


if __name__ == "__main__":
    main()
