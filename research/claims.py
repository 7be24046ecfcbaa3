"""Claims of papers, as data: what they print and show, where, and the rule by which a verdict is
found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

import yaml

VISIBLE = 0.1
"""Share of a value by which a shape has to rise or fall for a reader of the figure to see it."""
LEAST_SLOPE = 0.05
"""Distance from a limit that counts as one."""
LEAST_TAU = 0.5
"""Kendall's τ of what a reader of the figure would call a trend: three pairs of layers in order for
one that is not.
"""
LEAST_CHANGE = 0.02
"""Share of the largest value by which those of a trend differ at least."""
SETTLED = 0.25
"""Share of its growth by which a number that has settled may still change."""
LEAST_TYPES = 150
"""Token types that a regression over them needs."""

_LIMITED = (
    f"by more than z standard errors, and {LEAST_SLOPE} or what the row names as the least, at "
    "every layer that the row is about"
)
RULES: Mapping[str, str] = {
    "value": (
        "A value holds if it is no farther from the printed one than z standard errors and what "
        "rounding may have changed, or, where the paper says about, the tolerance that the row "
        "names. It is not comparable with another text, or where z standard errors are more than a "
        "quarter of the printed value. Values of one token type have no standard error; numbers of "
        "occurrences and texts have that of the difference of two random samples, and of types the "
        "root of twice the number of those that occur once."
    ),
    "fact": (
        "A fact of a model (layers, width, parameters, the place of its norms) holds if it is the "
        "printed one, but for rounding."
    ),
    "above": f"A value is above a limit if it is {_LIMITED}.",
    "below": f"A value is below a limit if it is {_LIMITED}.",
    "order": (
        "A model is above (below) the other group if its value differs from their mean that way by "
        f"more than z standard errors and {VISIBLE:.0%} of the mean; of another order of magnitude "
        "if it is so many times the mean as the row names. A span is the largest less the smallest "
        "value over the layers."
    ),
    "trend": (
        "A trend through the layers holds if Kendall's τ of value and depth has the sign, is more "
        f"than two of its standard errors from 0, which follow from the number of layers, and is "
        f"{LEAST_TAU} or more; it does not hold if, with two of them more, it is less, or if the "
        f"values differ by less than {LEAST_CHANGE:.0%}. Where no errors are known, a trend fails "
        "only if the opposite one holds."
    ),
    "settles": (
        "A number grows over training and then stabilises if its last value exceeds the first by "
        f"more than z standard errors and {VISIBLE:.0%}, and if it neither changes by more than "
        f"{SETTLED:.0%} of that growth over the second half of the steps, nor falls by more from "
        "its highest value."
    ),
    "peak": (
        "A peak (a dip) holds if the largest (smallest) value between the ends exceeds both ends "
        "by more than z standard errors of the difference; it does not hold if, within z of them, "
        f"it exceeds one by less than {VISIBLE:.0%} of that end. Through the layers it is that of "
        "the middle half, and does not hold if one outside of that is larger by more than z "
        "standard errors; if one is larger by less, it is not comparable."
    ),
    "phase": (
        "Phases are told apart by the two steps between which the number grows most (where it "
        "starts by growing: falls most): before them is the first, between them the second, after "
        "them the third. A phase holds if the number changes as claimed by more than z standard "
        "errors of the difference; it does not hold if, within z of them, it changes by less than "
        f"{VISIBLE:.0%} of the larger value. Where none is before the second, or after it, that is "
        "asked of each change within the second, and the least clear one is named."
    ),
    "unchecked": (
        "What cannot be checked says why. A picture is for a reader to compare with that of what "
        "was measured here, below it."
    ),
}
"""The rules by which verdicts are found, in words."""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper: the fields are explained in ``papers.yaml``."""

    at: str
    claim: str
    rule: str
    metric: str = ""
    why: str = ""
    source: str = ""
    note: str = ""
    models: tuple[str, ...] = ()
    group: str = ""
    layer: str = ""
    printed: str = ""
    within: float = 0.0
    token: str = ""
    rows: str = ""
    limit: float = 0.0
    least: float = LEAST_SLOPE
    times: float = 1.0
    least_types: int = 0
    least_rows: int = 0
    direction: str = ""
    over: str = ""
    than: str = ""
    phase: int = 0
    start: str = ""
    shown: tuple[str, ...] = ()

    @property
    def number(self) -> float:
        """The printed value."""
        return float(self.printed.replace(",", ""))

    @property
    def tolerance(self) -> float:
        """The tolerance of what the paper gives as about so much.

        Without one it is the most that rounding has changed: half a unit of the last printed digit.
        """
        exponent = Decimal(self.printed.replace(",", "")).as_tuple().exponent
        return self.within or float(0.5 * 10.0**exponent)


@dataclass(frozen=True)
class Paper:
    """A paper, its corpus in words, its groups of models, and its claims."""

    name: str
    title: str
    authors: str
    url: str
    text: str
    claims: tuple[Claim, ...]
    code: str = ""
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    layers: int = 4  # at which token types are drawn


def read_claims(name: str, path: Path | None = None) -> Paper:
    """Read the claims of a paper from a YAML file; default: ``papers.yaml`` beside this one."""
    file = path or Path(__file__).with_name("papers.yaml")
    entry = yaml.safe_load(file.read_text(encoding="utf-8"))[name]
    claims = []
    for each in entry["claims"]:
        several = {key: each[key] for key in ("models", "shown") if key in each}
        for key, value in several.items():
            several[key] = (value,) if isinstance(value, str) else tuple(value)
        claims.append(Claim(**{**each, **several}))
    return Paper(**{**entry, "name": name, "claims": tuple(claims)})
