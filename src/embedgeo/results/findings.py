"""Which headlines massive rows, or a single coordinate, make, in words."""

from collections.abc import Iterable, Iterator, Mapping
from math import isnan, nan
from typing import Any

from embedgeo.formatting import listed, number
from embedgeo.glossary import term

MOVED = 0.1
"""Share of itself by which a headline has to move."""
MOVED_SHARE, MOVED_ERRORS = 0.02, 2
"""By how much a share has to move, and by how many standard errors, where these are known."""
REMEDIES = {
    "massive": "Read the keys that end in _without_massive; skip_massive=True (--skip-massive) "
    "leaves these rows out of all keys.",
    "top_dim": "Read the keys that end in _without_top_dim, and anisotropy_standardized.",
    "both": "Read the keys that end in _without_massive_or_top_dim, and anisotropy_standardized.",
}
"""What to do, by kind."""

_SHARES = "V_W_over_V_unbiased", "M_over_Q", "anisotropy", "mean_cosine", "V_on_M_r2"
_KEYS = *_SHARES, "V", "V_on_M_slope", "intrinsic_dimension_between"
# the ends of the keys that are compared, by kind
_ENDS = {
    "massive": ("", "_without_massive"),
    "top_dim": ("", "_without_top_dim"),
    "both": ("_without_massive", "_without_massive_or_top_dim"),
}
_SHARE_OF_V = {"massive": "massive_share_of_V", "top_dim": "top_dim_share", "both": "top_dim_share"}
_MOST_NAMED = 4  # layers

Values = Mapping[str, float]


def moves(values: Values, errors: Values, kind: str) -> dict[str, tuple[float, float]]:
    """The headlines of a layer that move by more than a tenth of themselves without massive rows
    (``"massive"``), without the largest coordinate (``"top_dim"``), or without it once massive rows
    are left out (``"both"``).

    A share has to move by 0.02, too, and each by two standard errors, where these are known: the
    smaller one of both, for what makes a number makes its error large.

    Returns:
        By key, the value with and the value without; empty where none moves or none is known.
    """
    before, after = _ENDS[kind]
    found = {}
    for key in _KEYS:
        old, new = values.get(key + before, nan), values.get(key + after, nan)
        known = [errors.get(key + end, nan) for end in (before, after)]
        error = min((each for each in known if not isnan(each)), default=0.0)
        least = max(MOVED * abs(old), MOVED_ERRORS * error, MOVED_SHARE * (key in _SHARES))
        if abs(new - old) > least:
            found[key] = old, new
    return found


def findings(values: Values, errors: Values | None = None) -> dict[str, str]:
    """What makes the headlines of a layer: a sentence for each kind that moves some.

    Args:
        values: numbers of the layer by key.
        errors: their standard errors, where they are known.

    >>> values = {"n": 8192.0, "n_massive": 34.0, "n_massive_first": 32.0}
    >>> findings(values | {"M_over_Q": 0.013, "M_over_Q_without_massive": 0.476})["massive"]
    'without 34 massive rows of 8,192 (32 of them first positions) M / Q is 0.476, not 0.013'
    """
    found = {}
    for kind in REMEDIES:
        moved = moves(values, errors or {}, kind)
        if moved:
            told = (
                f"{term(key).name} is {number(new)}, not {number(old)}"
                for key, (old, new) in moved.items()
            )
            found[kind] = f"without {_left_out(values, kind)} {', '.join(told)}"
    return found


def _left_out(values: Values, kind: str) -> str:
    """What a kind leaves out, in words."""
    massive = values.get("n_massive", nan)
    rows = f"{massive:,.0f} massive {'row' if massive == 1 else 'rows'}"
    if kind == "massive":
        num_first = values.get("n_massive_first", 0.0)
        first = f" ({num_first:,.0f} of them first positions)" if num_first else ""
        return f"{rows} of {values.get('n', nan):,.0f}{first}"
    share = values.get("top_dim_share", nan)
    if kind == "top_dim":
        return f"the largest coordinate ({share:.0%} of the variance)"
    return f"{rows} and the largest coordinate, compared with without the rows alone,"


def lines(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """What makes the headlines of one measurement: a line for each kind, of the layer where what is
    left out holds most of the variance, with the names of the others and what to do.

    >>> lines([])
    []
    """
    values: dict[str, dict[str, float]] = {}
    errors: dict[str, dict[str, float]] = {}
    for record in records:
        values.setdefault(record["layer"], {})[record["metric"]] = record["value"]
        errors.setdefault(record["layer"], {})[record["metric"]] = record["stderr"]
    found = {layer: findings(values[layer], errors[layer]) for layer in values}
    return [*_lines(values, found)]


def _lines(values: Mapping[str, Values], found: Mapping[str, dict[str, str]]) -> Iterator[str]:
    for kind, remedy in REMEDIES.items():
        where = [layer for layer, of_layer in found.items() if kind in of_layer]
        if where:
            share = _SHARE_OF_V[kind]
            worst = max(where, key=lambda layer: values[layer].get(share, 0.0))
            others = listed([layer for layer in where if layer != worst], _MOST_NAMED)
            also = f" (also at {others})" if others else ""
            yield f"{worst}: {found[worst][kind]}{also}. {remedy}"
