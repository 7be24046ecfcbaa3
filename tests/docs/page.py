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


KEYS = [key for keys, _ in _sections("") for key in keys]
"""Every key that is defined."""

TWONN = {
    (int(n.replace(",", "")), dim): float(cell)
    for chapter in _chapters("Intrinsic")
    for n, cells in re.findall(r"^\| N = ([\d,]+) \|(.+)\|$", chapter, flags=re.MULTILINE)
    for dim, cell in zip((2, 8, 32, 128, 768), cells.split("|"), strict=True)
}
"""TwoNN of Gaussian rows, by their number and width."""
