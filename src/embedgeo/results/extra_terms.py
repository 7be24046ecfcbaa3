"""What the glossary says of the metrics that are measured only if they are asked for."""

from embedgeo.results.term import Term

SPECTRUM: dict[str, Term] = {}

SCALES: dict[str, Term] = {}

COORDINATES: dict[str, Term] = {}

SIMILARITY: dict[str, Term] = {}

NEXT_TOKEN: dict[str, Term] = {}

DRIFT: dict[str, Term] = {}

NORMALIZATION: dict[str, Term] = {}

EXTRA_TERMS = SPECTRUM | SCALES | COORDINATES | SIMILARITY | NEXT_TOKEN | DRIFT | NORMALIZATION
"""By metric, in the order in which to look at them; their group is "more" unless they say another one."""
