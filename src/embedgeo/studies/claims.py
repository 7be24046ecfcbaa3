"""Claims of papers, as data: what they print and show, where, and the rule by which a verdict is
found.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from embedgeo.formatting import did_you_mean, listed

VISIBLE = 0.1
"""Share of a value by which a shape has to rise or fall for a reader of the figure to see it."""
LEAST_SLOPE = 0.05
"""Slope below zero that counts as one."""
LEAST_TAU = 0.5
"""Kendall's τ of what a reader of the figure would call a trend: three pairs of layers in order for
one that is not.
"""

RULES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "value": (
        ("layer", "printed"),
        "A value holds if it is no farther from the printed one than z standard errors and half a "
        "unit of the last printed digit. It is not comparable with another text, or where z "
        "standard errors are more than a quarter of the printed value.",
    ),
    "token": (
        ("layer", "printed", "token"),
        "A value of one token type, which has no standard error, holds if it is within the share "
        "of the printed one that the row names.",
    ),
    "count": (
        ("printed",),
        "A count holds if it is no farther from the printed one than z standard errors of the "
        "difference of two such samples: of occurrences, of texts drawn at random; of types, the "
        "root of twice the number of those that occur once. Special tokens do not count. It is "
        "comparable only of the whole of the same share of the text.",
    ),
    "below": (
        ("layer",),
        "A slope is below zero if it is by more than z standard errors, at every layer that the "
        f"row is about; it is not if it may be no more than {LEAST_SLOPE} below at one of them: by "
        "its value and z standard errors.",
    ),
    "trend": (
        ("direction",),
        "A trend through the layers holds if Kendall's τ of value and depth has the sign and is "
        "more than two of its standard errors from 0, which follow from the number of layers; it "
        f"does not hold if, with two of them more, it is less than {LEAST_TAU}. Values that differ "
        "by less than z of their largest errors are not comparable, unless those would have left "
        f"{VISIBLE:.0%} to be seen. Where no errors are known, a trend fails only if the opposite "
        "one holds.",
    ),
    "peak": (
        ("over",),
        "A peak holds if the largest value between the ends exceeds both ends by more than z "
        "standard errors of the difference; it does not hold if, within z of them, it exceeds one "
        f"by less than {VISIBLE:.0%} of that end. Through the layers the peak is the largest value "
        "of the middle half, and does not hold if one outside of that is larger by more than z "
        "standard errors; if one is larger by less, it is not comparable.",
    ),
    "flatter": (
        ("than",),
        "A profile is flatter if its span over the layers (largest less smallest value) is less "
        "than the mean span of the other group by more than z standard errors of the difference; "
        f"it is not if, within z of them, it is less by under {VISIBLE:.0%} of that.",
    ),
    "phase": (
        ("phase", "start"),
        "Phases are told apart by the two steps between which the number grows most (where it "
        "starts by growing: falls most): before them is the first, between them the second, after "
        "them the third. A phase holds if the number changes as claimed by more than z standard "
        "errors of the difference; it does not hold if, within z of them, it changes by less than "
        f"{VISIBLE:.0%} of the larger value. Where none is before the second, or after it, that is "
        "asked of each change within the second, and the least clear one is named.",
    ),
    "unprinted": (
        ("layer",),
        "Where nothing but a picture is known of the paper, what was measured stands beside that "
        "of Gaussian rows that are independent of their tokens, if that is known.",
    ),
    "picture": (
        (),
        "A picture is for a reader to compare: the one of what was measured here stands below it.",
    ),
}
"""The fields that a claim of each rule needs beside ``metric``, which a picture has none of, and
the rule in words.
"""

_CHOICES = {
    "direction": ("", "up", "down"),
    "over": ("", "layers", "steps"),
    "start": ("", "down", "up"),
    "phase": (0, 1, 2, 3),
    "group": ("", "encoder", "decoder"),
    "than": ("", "encoder", "decoder"),
}
_COUNTS = ("types", "occurrences")


@dataclass(frozen=True)
class Claim:
    """A claim of a paper: the fields are explained in ``papers.yaml``.

    Raises:
        ValueError: a field that the rule needs is missing, or has a value that it cannot have.
    """

    at: str
    claim: str
    rule: str
    metric: str = ""
    source: str = ""
    note: str = ""
    models: tuple[str, ...] = ()
    group: str = ""
    layer: str = ""
    printed: str = ""
    token: str = ""
    within: float = 0.05
    least_types: int = 0
    least_rows: int = 0
    direction: str = ""
    over: str = ""
    than: str = ""
    phase: int = 0
    start: str = ""
    shown: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}; got {self.rule!r}")
        needed = RULES[self.rule][0] if self.rule == "picture" else ("metric", *RULES[self.rule][0])
        if missing := [name for name in needed if not getattr(self, name)]:
            raise ValueError(f"rule {self.rule} needs {', '.join(missing)}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(str, choices[1:]))}; got "
                    f"{getattr(self, name)!r}"
                )
        if self.rule == "count" and self.metric not in _COUNTS:
            raise ValueError(
                f"metric of a count must be one of {', '.join(_COUNTS)}; got {self.metric!r}"
            )
        if self.rule == "token" and self.metric not in ("Q", "M", "V"):
            raise ValueError(f"metric of a token must be Q, M or V; got {self.metric!r}")
        if self.printed:
            self.number  # noqa: B018  # it is one

    @property
    def number(self) -> float:
        """The printed value."""
        return float(self._decimal)

    @property
    def rounding(self) -> float:
        """The most that rounding has changed: half a unit of the last printed digit."""
        exponent = self._decimal.as_tuple().exponent
        assert isinstance(exponent, int)  # of a finite number
        return float(0.5 * 10.0**exponent)

    @property
    def _decimal(self) -> Decimal:
        try:
            found = Decimal(self.printed.replace(",", ""))
        except InvalidOperation:
            found = Decimal("nan")
        if not found.is_finite():
            raise ValueError(f"printed must be a number, as text; got {self.printed!r}")
        return found


@dataclass(frozen=True)
class Paper:
    """A paper, its corpus in words, and its claims."""

    name: str
    title: str
    authors: str
    url: str
    text: str
    claims: tuple[Claim, ...]
    code: str = ""
    layers: int = 4  # at which the report draws token types and spectra


def read_claims(name: str, path: Path | None = None) -> Paper:
    """Read the claims of a paper.

    Args:
        name: of its preset.
        path: a YAML file; default: the package's.

    Raises:
        OSError: there is no such file.
        ValueError: it is not of the form of the package's, or has no such paper.
    """
    import yaml

    file = path or Path(__file__).with_name("papers.yaml")
    try:
        papers = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileNotFoundError(
            f"claims must be a YAML file; {file} cannot be read ({error.strerror})."
        ) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"claims must be a YAML file; {file} is none ({error}).") from error
    if not isinstance(papers, dict) or not isinstance(papers.get(name), dict):
        known = listed(list(papers)) if isinstance(papers, dict) else "no mapping"
        raise ValueError(f"claims must be a mapping that has {name}; {file} has {known}.")  # noqa: TRY004  # of a file
    entry = {**papers[name]}
    claims = entry.pop("claims", None)
    if not isinstance(claims, list) or not claims:
        raise ValueError(f"claims of {name} in {file} must be a list with some; got {claims!r}.")
    made = tuple(
        _made(Claim, each, f"claim {i} of {name} in {file}") for i, each in enumerate(claims, 1)
    )
    paper: Paper = _made(Paper, {**entry, "name": name, "claims": made}, f"{name} in {file}")
    return paper


def _made(kind: type[Any], entry: Any, where: str) -> Any:
    """An entry as a data class; its errors say where it is."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be a mapping; got {entry!r}.")  # noqa: TRY004  # of a file
    known = {field.name: field for field in fields(kind)}
    for name, value in entry.items():
        if name not in known:
            raise ValueError(
                f"{where} has {name!r}, which is no field.{did_you_mean(str(name), known)}"
            )
        kind_of: Any = known[name].type
        kinds = {str: (str,), int: (int,), float: (float, int)}.get(kind_of)
        if kinds and type(value) not in kinds:
            raise ValueError(f"{where}: {name} must be {kinds[0].__name__}; got {value!r}.")
    missing = [
        name for name, field in known.items() if field.default is MISSING and name not in entry
    ]
    if missing:
        raise ValueError(f"{where} needs {', '.join(missing)}.")
    several = {name for name, field in known.items() if isinstance(field.default, tuple)}
    given = {
        name: (value,) if name in several and isinstance(value, str) else value
        for name, value in entry.items()
    }
    try:
        return kind(
            **{
                name: tuple(value) if isinstance(value, list) else value
                for name, value in given.items()
            }
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}.") from error
