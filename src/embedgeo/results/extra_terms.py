"""What the glossary says of the metrics that are measured only if they are asked for."""

from embedgeo.results.term import Term

SPECTRUM: dict[str, Term] = {}

SCALES: dict[str, Term] = {}

_OF_ROWS = {
    "": ("", ""),
    "_first": (", first positions", " Here of the first row of each sequence: attention sinks show here."),
    "_rest": (", the rest", " Here of the rows that are not the first of their sequence."),
}
_OUTLIERS = {
    "kurtosis": Term(
        "kurtosis of coordinates",
        "excess kurtosis over rows, mean over coordinates",
        "How heavy the tails of the coordinates are: 0 for a Gaussian, large where few rows hold most of the variance.",
        ranges=True,
    ),
    "max_abs": Term("largest entry", "max |x|, embedding units", "The largest magnitude of an entry.", ranges=True),
    "massive_fraction": Term(
        "massive rows",
        "share of rows with |x| > 100 and > 1000 × median |x|",
        "Rows with a massive activation: an entry over 100 that is over 1000 times the median one of its row.",
    ),
    "massive_fraction_100x": Term(
        "massive rows, 100 ×",
        "share of rows with an |x| > 100 × median |x|",
        "Rows with an entry over 100 times the median one of the row, however large.",
    ),
    "massive_fraction_1000x": Term(
        "massive rows, 1000 ×",
        "share of rows with an |x| > 1000 × median |x|",
        "Rows with an entry over 1000 times the median one of the row, however large.",
    ),
}
_DRAWN = ("kurtosis", "max_abs", "massive_fraction")
"""Those with figures of their own; first positions against the rest have one of all of them together."""

COORDINATES = {
    key + suffix: Term(term.name + name, term.unit, term.meaning + meaning, term.ranges, key + suffix in _DRAWN)
    for key, term in _OUTLIERS.items()
    for suffix, (name, meaning) in _OF_ROWS.items()
}

SIMILARITY: dict[str, Term] = {}

NEXT_TOKEN: dict[str, Term] = {}

DRIFT: dict[str, Term] = {}

NORMALIZATION: dict[str, Term] = {}

EXTRA_TERMS = SPECTRUM | SCALES | COORDINATES | SIMILARITY | NEXT_TOKEN | DRIFT | NORMALIZATION
"""By metric, in the order in which to look at them; their group is "more" unless they say another one."""
