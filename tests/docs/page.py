"""The sections and tables of docs/definitions.md."""

import re

from docs.facts import PAGE, keys_of

TEXT = PAGE.read_text()


def _chapters(heading):
    """The chapters, with all that is in them, under the headings that match."""
    return [
        chapter
        for chapter in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
        if re.match(heading, chapter)
    ]


def _sections(heading):
    """Keys and text of the sections on keys in these chapters."""
    for chapter in _chapters(heading):
        for section in re.split(r"^### ", chapter, flags=re.MULTILINE)[1:]:
            title, text = section.split("\n", 1)
            yield keys_of(title), text


def keys_under(heading):
    return {key for keys, _ in _sections(heading) for key in keys}


def _numbers(heading, first):
    """The numbers in the rows of tables that begin so, with what the row is of."""
    for chapter in _chapters(heading):
        for row in re.findall(rf"^\| {first}([\d,]+) \|(.+)\|$", chapter, flags=re.MULTILINE):
            yield int(row[0].replace(",", "")), [float(cell) for cell in row[1].split("|")]


KEYS = [key for keys, _ in _sections("") for key in keys]
"""Every key that is defined."""

_WIDTHS = (2, 8, 32, 128, 768)

TWONN = {
    (n, dim): value
    for n, values in _numbers("Intrinsic", "N = ")
    for dim, value in zip(_WIDTHS, values, strict=True)
}
"""TwoNN of Gaussian rows, by their number and width."""
