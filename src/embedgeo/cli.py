"""The command line: ``embedgeo COMMAND``."""

import sys
from collections.abc import Sequence
from typing import Any

from embedgeo.sweep import check, sweep

_COMMANDS: Any = {"sweep": sweep, "check": check}
_LISTS = {"--text"}
"""Options that take several values, as in ``--text a.txt b.txt``."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exits with its status: 2 where an argument, or the machine, does not allow it."""
    from jsonargparse import auto_cli

    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = auto_cli(_COMMANDS, args=spread_lists(given), as_positional=False)
    except (ValueError, OSError) as error:
        sys.exit(_fail(error))
    sys.exit(int(status or 0))


def spread_lists(arguments: Sequence[str]) -> list[str]:
    """Write ``--text a b`` as jsonargparse takes it.

    >>> spread_lists(["sweep", "--text", "a", "b", "--steps", "0,1"])
    ['sweep', '--text+=a', '--text+=b', '--steps', '0,1']
    """
    spread: list[str] = []
    option = ""
    for argument in arguments:
        if argument.startswith("--"):
            option = argument if argument in _LISTS else ""
        if not option:
            spread.append(argument)
        elif argument != option:
            spread.append(f"{option}+={argument}")
    return spread


def _fail(error: Exception) -> int:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    print(f"embedgeo: {' '.join(lines) or type(error).__name__}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
