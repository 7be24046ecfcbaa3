"""Names, units, meanings and order of what is measured, as metrics declare them."""

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from embedgeo.formatting import printable

DEFINITIONS = 1
"""A number that grows where a value of the same rows becomes another one."""
GROUPS = (
    "at a glance",
    "size and variance",
    "norms",
    "shape",
    "token types",
    "rows counted",
    "more",
)
"""Groups of metrics, in the order of TensorBoard's custom-scalars tab; those of the first are the
headlines.
"""

GAUSSIAN = "Gaussian rows"  # the name of their values, beside measured ones


class Term(NamedTuple):
    """Name, unit and meaning of a metric, for people.

    Attributes:
        name: short, for titles and axes.
        unit: unit and, where there are several, the estimator.
        meaning: one or two sentences.
        ranges: its values may span orders of magnitude.
        is_drawn: the report has figures of it; else it is only in the table, in the flags or a
            dashed line.
        group: one of `embedgeo.glossary.GROUPS`; metrics of the first are shown first everywhere.
        order: place among all metrics, ascending; those of one place stand as they were declared.
        gaussian: its value for isotropic Gaussian rows, where that does not depend on their number,
            width or size.
        is_scalar: monitors log it, as they log the headlines, unless told otherwise: see
            ``scalars`` of `embedgeo.GeometryMonitor`.
        rows: how many random rows it needs for an error under 5 % ("How much to measure"), or 0.
        rows_per_dimension: how many for each dimension.
    """

    name: str
    unit: str
    meaning: str
    ranges: bool = False
    is_drawn: bool = True
    group: str = "more"
    order: int = 1000
    gaussian: float | None = None
    is_scalar: bool = False
    rows: int = 0
    rows_per_dimension: int = 0

    def is_logarithmic(self, low: float, high: float) -> bool:
        """Tell whether values in a range go on a logarithmic scale: all of them positive, over more
        than a factor of 10.
        """
        return self.ranges and 1e-200 < 10 * low < high < 1e200


# gives the term of a key that is made from another one, None of other keys
Family = Callable[[str], Term | None]


class Glossary:
    """Terms by key, and families of keys."""

    def __init__(self) -> None:
        self.terms: dict[str, Term] = {}
        self.families: list[Family] = []

    def find(self, key: str) -> Term | None:
        """The term of a key, None of an unknown one."""
        return self.terms.get(key) or next(
            filter(None, (family(key) for family in self.families)), None
        )


OWN, FOREIGN = Glossary(), Glossary()
"""Terms of this package, and those of metrics from elsewhere; a key of both is this package's."""


def in_group(group: str, order: int, /, **terms: Term) -> dict[str, Term]:
    """Terms by key, of one group and at one place; tables of them have name and unit in a line, the
    meaning below.
    """
    return {key: each._replace(group=group, order=order) for key, each in terms.items()}


def register(
    terms: Mapping[str, Term], family: Family | None = None, *, is_own: bool = False
) -> None:
    """Add terms, and the family of further keys."""
    for key, each in terms.items():
        if each.group not in GROUPS:
            raise ValueError(
                f"the group of a term must be one of {', '.join(GROUPS)}; {key} has {each.group!r}."
            )
    glossary = OWN if is_own else FOREIGN
    glossary.terms.update(terms)
    if family is not None:
        glossary.families.append(family)


def term(key: str) -> Term:
    """The term of a metric; a metric that is not in the glossary keeps its key as its name."""
    return (
        OWN.find(key) or FOREIGN.find(key) or Term(printable(key), "value", "A metric of your own.")
    )


def known_terms() -> dict[str, Term]:
    """All terms by key, in the order in which to look at them; without those of families."""
    terms = OWN.terms | {key: each for key, each in FOREIGN.terms.items() if key not in OWN.terms}
    return dict(sorted(terms.items(), key=lambda item: item[1].order))


def in_order(metrics: Iterable[str]) -> list[str]:
    """Distinct metrics in the order in which to look at them; unknown ones last, by name."""
    rank = {key: i for i, key in enumerate(known_terms())}
    return sorted(set(metrics), key=lambda key: (rank.get(key, len(rank)), key))


def headlines() -> tuple[str, ...]:
    """The metrics to look at first, in order."""
    return tuple(key for key, each in known_terms().items() if each.group == GROUPS[0])


def foreign_terms(metrics: Iterable[str]) -> str:
    """The terms of those metrics that are from elsewhere, as JSON for `learn`; empty where there
    are none.
    """
    known = {key: FOREIGN.find(key) for key in sorted(set(metrics)) if not OWN.find(key)}
    terms = {key: each._asdict() for key, each in known.items() if each}
    return json.dumps(terms, ensure_ascii=False) if terms else ""


def learn(written: str) -> None:
    """Take up terms that `foreign_terms` has written in another process; those of known keys stay
    as they are.
    """
    for key, fields in json.loads(written or "{}").items():
        if OWN.find(key) is None and FOREIGN.find(key) is None:
            known = Term(**{name: value for name, value in fields.items() if name in Term._fields})
            FOREIGN.terms[key] = known if known.group in GROUPS else known._replace(group="more")


_WRITTEN = tomllib.loads((Path(__file__).parent / "terms.toml").read_text(encoding="utf-8"))

DRIFT = {key: Term(**fields) for key, fields in _WRITTEN["drift"].items()}
"""Comparisons of steps by `embedgeo drift` and `embedgeo.Drift`."""

WITHOUT_BOTH = "_without_massive_or_top_dim"
WITHOUT_MASSIVE = "_without_massive"
WITHOUT_TOP_DIM = "_without_top_dim"
"""Ends of the keys of numbers without massive rows, without the largest coordinate, or both."""

_OF_MODELS = {key: Term(**fields) for key, fields in _WRITTEN["models"].items()}


register(DRIFT | _OF_MODELS, is_own=True)


def left_without(whole: Term, what: str) -> Term:
    """The term of a number of what is left without something, given that of the whole."""
    return whole._replace(
        name=f"{whole.name} without {what}",
        meaning=f"{whole.name} of what is left without {what}.",
        is_drawn=False,
        is_scalar=False,
        group="more",
        order=800,
        rows=0,
        rows_per_dimension=0,
    )


def is_without(key: str) -> bool:
    """Tell whether a key is of a number without massive rows or without the largest coordinate."""
    return key.endswith((WITHOUT_BOTH, WITHOUT_MASSIVE, WITHOUT_TOP_DIM))
