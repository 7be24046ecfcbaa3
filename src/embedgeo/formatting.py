"""Numbers, names and errors as text: on axes, in tables, in messages."""

import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import IO, Any


def short(number: float, digits: int = 3) -> str:
    """A number for an axis."""
    import numpy as np

    if 0 < abs(number) < 1e-3:
        rounded = np.format_float_scientific(number, digits - 1, trim="-", exp_digits=1)
        return with_minus(rounded.replace(".e", "e"))
    unit, letter = _unit(number, "BMk")
    rounded = np.format_float_positional(number / unit, digits, fractional=False, trim="-")
    return with_minus(rounded + letter)


def _unit(number: float, letters: str) -> tuple[float, str]:
    """The largest of 10⁹, 10⁶ and 10³ that a number reaches, and its letter; else 1."""
    units = zip((1e9, 1e6, 1e3), letters, strict=True)
    return next(((unit, letter) for unit, letter in units if abs(number) >= unit), (1, ""))


def with_minus(numbers: str) -> str:
    """Numbers as they are drawn: with signs that are as wide as a plus, where Python writes
    hyphens.
    """
    return numbers.replace("-", "\N{MINUS SIGN}")


def number(value: float) -> str:
    """A number in a sentence or a table."""
    # without a sign of zero
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value + 0.0:.4g}"


def size(num_bytes: float) -> str:
    """A number of bytes."""
    unit, letter = _unit(num_bytes, "GMk")
    return f"{num_bytes / unit:.3g} {letter}B"


def with_error(value: float, error: float) -> str:
    """A number with its standard error, where it has one: to two digits of the error."""
    if not max(1e-12 * abs(value), 1e-250) < error < inf:  # unknown, none, or rounding
        return number(value)
    last = int(f"{error:.1e}".partition("e")[2]) - 1  # the exponent of the error's second digit
    first = max(last + 1, int(f"{value or error:.0e}".partition("e")[2]))
    power = 0 if -4 <= first < 9 else first
    digits = max(0, power - last)
    both = " ± ".join(f"{round(each, -last) / 10.0**power:,.{digits}f}" for each in (value, error))
    return f"({both})e{power}" if power else both


def printable(name: str) -> str:
    """A name on one line, without letters that cannot be drawn."""
    return "".join(letter if letter.isprintable() else "␣" for letter in name)


def cell(value: Any) -> Any:
    """A value in a CSV file: a text that a spreadsheet would compute is behind an apostrophe."""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else value


def write_csv(table: Any, file: Path | IO[str], **options: bool) -> None:
    """Write a table of pandas, with options of ``to_csv``; names in it are as `cell` has them."""
    named = table.apply(lambda column: column if column.dtype.kind in "fi" else column.map(cell))
    named.rename(index=cell, columns=cell).to_csv(file, lineterminator="\n", **options)


def listed(names: Sequence[object], most: int = 8) -> str:
    """Names with commas between them; of more than ``most`` the first ones, and the number of the
    others.
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question to be put after an unknown name; empty where none that is known is like it.

    >>> did_you_mean("every_n_step", ["every_n_steps", "extra_steps"])
    ' Did you mean every_n_steps?'
    >>> did_you_mean("M_over_q", ["M_over_V", "M_over_Q"])
    ' Did you mean M_over_Q?'
    """
    by_letters = {each.lower(): each for each in known}
    likely = get_close_matches(name.lower(), by_letters, 1)
    return "".join(f" Did you mean {by_letters[other]}?" for other in likely)


def reason(error: BaseException) -> str:
    """An error in one line."""
    lines = [
        line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()
    ]
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
    return " ".join(lines)[:400] + notes


def shell_command(program: str, *arguments: object) -> str:
    """A command that can be pasted into a shell: ``embedgeo`` or ``tensorboard``, and its
    arguments.

    A program that is not on the PATH is run as a module by the Python that runs now. Paths in the
    working directory are named from there.
    """
    modules = {"embedgeo": "embedgeo.cli", "tensorboard": "tensorboard.main"}
    start = [program] if shutil.which(program) else [sys.executable, "-m", modules[program]]
    here = Path.cwd()
    shown = [
        each.relative_to(here) if isinstance(each, Path) and here in each.parents else each
        for each in arguments
    ]
    return shlex.join([*start, *map(str, shown)])
