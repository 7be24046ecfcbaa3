"""What `from embedgeo import GeometryMonitor` adds to the imports of Lightning and torch, and a
sweep to those of torch and the class of a model, each in a new interpreter.

python -m benchmarks.imports
"""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from benchmarks.timing import Line, arguments_parser, clocked, report, take_turns

LIGHTNING = "import lightning, torch"
MODEL = "import torch; from transformers import AutoTokenizer, GPTNeoXForCausalLM"
CASES = (
    ("GeometryMonitor", LIGHTNING, "from embedgeo import GeometryMonitor", 1.1),
    ("a sweep", MODEL, "import embedgeo.cli, embedgeo.sweep.measure", 1.5),
)
"""What is imported, what is imported without it, and the ratio of both at most."""


def imports(rounds: int) -> Iterator[Line]:
    """The ratio of both, with bytecode that an earlier run has left, as an installed package has
    it.
    """
    for name, plain, own, at_most in CASES:
        sides = {
            side: clocked(partial(subprocess.run, [sys.executable, "-c", code], check=True))
            for side, code in {plain: plain, "embedgeo": f"{plain}; {own}"}.items()
        }
        seconds = take_turns(sides, rounds)
        yield Line(f"imports with {name} ÷ without", seconds, "embedgeo", plain, at_most=at_most)


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    report(imports(arguments.rounds), arguments.json)


if __name__ == "__main__":
    main()
