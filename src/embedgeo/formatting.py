"""Numbers, names and errors as text: on axes, in tables, in messages."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from math import inf

import numpy as np


def short(number: float, digits: int = 3) -> str:
    """A number for an axis.

    >>> short(143_000), short(2e6), short(999.9), short(0.12345), short(1e-7), short(-0.00025)
    ('143k', '2M', '1000', '0.123', '1e-7', '-2.5e-4')
    """
    if 0 < abs(number) < 1e-3:
        return np.format_float_scientific(number, digits - 1, trim="-", exp_digits=1)
    size, letter = next(((size, s) for size, s in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if abs(number) >= size), (1, ""))
    return np.format_float_positional(number / size, digits, fractional=False, trim="-") + letter


def number(value: float) -> str:
    """A number in a sentence or a table.

    >>> number(323_812.4), number(0.0123456), number(7.0), number(-0.0)
    ('323,812', '0.01235', '7', '0')
    """
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value + 0.0:.4g}"  # without a sign of zero


def size(num_bytes: float) -> str:
    """A number of bytes.

    >>> size(536_936_480), size(88), size(24_664)
    ('537 MB', '88 B', '24.7 kB')
    """
    unit, name = next(((u, s) for u, s in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if num_bytes >= u), (1, "B"))
    return f"{num_bytes / unit:.3g} {name}"


def with_error(value: float, error: float) -> str:
    """A number with its standard error, where it has one: to two digits of the error.

    >>> with_error(0.41234, 0.00456), with_error(323_812.4, 1_234.0), with_error(2.5e-5, 3.14e-7), with_error(0.5, inf)
    ('0.4123 ± 0.0046', '323,800 ± 1,200', '(2.500 ± 0.031)e-5', '0.5')
    """
    if not max(1e-12 * abs(value), 1e-250) < error < inf:  # unknown, none, or rounding
        return number(value)
    last = int(f"{error:.1e}".partition("e")[2]) - 1  # the exponent of the error's second digit
    first = max(last + 1, int(f"{value or error:.0e}".partition("e")[2]))
    power = 0 if -4 <= first < 9 else first
    digits = max(0, power - last)
    both = " ± ".join(f"{round(each, -last) / 10.0**power:,.{digits}f}" for each in (value, error))
    return f"({both})e{power}" if power else both


def printable(name: str) -> str:
    """A name on one line, without letters that cannot be drawn.

    >>> printable("a" + chr(9) + "b")
    'a␣b'
    """
    return "".join(letter if letter.isprintable() else "␣" for letter in name)


def listed(names: Sequence[object], most: int = 8) -> str:
    """Names with commas between them; of more than ``most`` the first ones, and the number of the others.

    >>> listed(["a", "b"]), listed(range(5), most=3)
    ('a, b', '0, 1, 2 and 2 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def reason(error: BaseException) -> str:
    """An error in one line."""
    lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
    return " ".join(lines)[:400] + notes


def shell_command(program: str, *arguments: object) -> str:
    """A command that can be pasted into a shell: ``embedgeo`` or ``tensorboard``, and its arguments.

    A program that is not on the PATH is run as a module by the Python that runs now.
    """
    modules = {"embedgeo": "embedgeo.cli", "tensorboard": "tensorboard.main"}
    start = [program] if shutil.which(program) else [sys.executable, "-m", modules[program]]
    return shlex.join([*start, *map(str, arguments)])
