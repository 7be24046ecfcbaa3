"""The tables of docs/definitions.md."""

import re
from pathlib import Path

_TEXT = Path(__file__).parents[2].joinpath("docs", "definitions.md").read_text(encoding="utf-8")


def rows(heading):
    """Cells of the rows of all tables under the headings that match, without their head rows."""
    for section in re.split(r"^## ", _TEXT, flags=re.MULTILINE)[1:]:
        if re.match(heading, section):
            for table in re.findall(r"(?:^\|.*\|$\n)+", section, flags=re.MULTILINE):
                for line in table.splitlines()[2:]:
                    yield [cell.strip() for cell in line.strip("|").split("|")]


def _keyed(heading):
    """Last cell of the rows that define a key, by key."""
    return [(cells[0].strip("`"), cells[-1]) for cells in rows(heading) if re.fullmatch(r"`\w+`", cells[0])]


def keys_under(heading):
    return {key for key, _ in _keyed(heading)}


KEYS = [key for key, _ in _keyed("")]
"""Every key that is defined."""

GAUSSIAN = dict(_keyed("(?!A checkpoint)"))
"""What random rows show, in words, by key; empty where there is no such value."""

CONVENTIONS = [cells[0] for cells in rows("Other definitions")]
"""The lines of the table of other definitions."""

TWONN = {
    (n, dim): float(value)
    for n, values in zip((256, 1024, 4096), [c[1:] for c in rows("Intrinsic") if c[0].startswith("N =")], strict=True)
    for dim, value in zip((2, 8, 32, 128, 768), values, strict=True)
}
"""TwoNN of Gaussian rows, by their number and width."""

GRIDE = {
    (int(row[0].removeprefix("n₁ =")), dim): float(value)
    for row in rows("Dimension over")
    if row[0].startswith("n₁ =")
    for dim, value in zip((2, 8, 32, 128, 768), row[1:], strict=True)
}
"""GRIDE of 1024 Gaussian rows, by scale and width."""
