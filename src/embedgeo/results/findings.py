"""Which headlines massive rows, or a single coordinate, make, or rest on few rows, in words."""

from collections.abc import Iterable, Mapping
from math import inf, isnan, nan
from typing import Any, NamedTuple

from embedgeo.formatting import listed, number
from embedgeo.glossary import WITHOUT_BOTH, WITHOUT_MASSIVE, WITHOUT_TOP_DIM, in_order, term

MOVED = 0.1
"""Share of itself by which a headline has to move."""
MOVED_SHARE, MOVED_ERRORS = 0.02, 2
"""By how much a share has to move, and by how many standard errors, where these are known."""


class Kind(NamedTuple):
    """What is left out of the headlines."""

    title: str
    remedy: str
    share: str  # key of the share of V that it has
    before: str  # ends of the keys that are compared
    after: str


KINDS = {
    "massive": Kind(
        "Massive rows make the numbers",
        "Read the keys that end in _without_massive; skip_massive=True (--skip-massive) leaves "
        "these rows out of all keys.",
        "massive_share_of_V",
        "",
        WITHOUT_MASSIVE,
    ),
    "top_dim": Kind(
        "One coordinate makes the numbers",
        "Read the keys that end in _without_top_dim, and anisotropy_standardized.",
        "top_dim_share",
        "",
        WITHOUT_TOP_DIM,
    ),
    "both": Kind(
        "One coordinate makes the numbers without massive rows",
        "Read the keys that end in _without_massive_or_top_dim.",
        "massive_share_of_V",
        WITHOUT_MASSIVE,
        WITHOUT_BOTH,
    ),
}

MORE_ROWS = "Read trends alone, or take more: probe=, window=, --num-tokens."

_SHARES = "V_W_over_V_unbiased", "M_over_Q", "anisotropy", "mean_cosine", "V_on_M_r2"
_KEYS = *_SHARES, "V", "V_on_M_slope", "intrinsic_dimension_between"
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
    moved = {}
    for key in _KEYS:
        with_it = key + KINDS[kind].before
        without = key + KINDS[kind].after
        old = values.get(with_it, nan)
        new = values.get(without, nan)
        known = [errors[each] for each in (with_it, without) if not isnan(errors.get(each, nan))]
        error = min(known, default=0.0)
        least = max(MOVED * abs(old), MOVED_ERRORS * error, MOVED_SHARE * (key in _SHARES))
        if abs(new - old) > least:
            moved[key] = old, new
    return moved


def finding(values: Values, errors: Values, kind: str) -> str:
    """What makes the headlines of a layer, in a sentence; empty where this kind moves none.

    Args:
        values: numbers of the layer by key.
        errors: their standard errors, where they are known.
        kind: of `KINDS`.

    >>> values = {"n": 8192.0, "n_massive": 34.0, "n_massive_first": 32.0}
    >>> finding(values | {"M_over_Q": 0.013, "M_over_Q_without_massive": 0.476}, {}, "massive")
    'without 34 massive rows of 8,192 (32 of them first positions) M / Q is 0.476, not 0.013'
    """
    moved = moves(values, errors, kind)
    changes = (
        f"{term(key).name} is {number(new)}, not {number(old)}" for key, (old, new) in moved.items()
    )
    return f"{_left_out(values, kind)} {', '.join(changes)}" if moved else ""


def _left_out(values: Values, kind: str) -> str:
    """What a kind leaves out, in words."""
    massive = values.get("n_massive", nan)
    rows = f"{massive:,.0f} massive {'row' if massive == 1 else 'rows'}"
    if kind == "massive":
        num_first = values.get("n_massive_first", nan)
        more = f" ({num_first:,.0f} of them first positions)" if num_first > 0 else ""
        return f"without {rows} of {values.get('n', nan):,.0f}{more}"
    if kind == "top_dim":
        share = values.get("top_dim_share", nan)
        known = "" if isnan(share) else f" ({share:.0%} of the variance)"
        return f"without the largest coordinate{known}"
    return f"once {rows} are left out, without the largest coordinate"


def few_rows(num_rows: float, width: float, metrics: Iterable[str]) -> str:
    """The metrics for which rows are too few, with the number that each needs.

    >>> few_rows(3000, 128, ["V_W_over_V_unbiased", "anisotropy"])
    'V_W / V (4,096)'
    """
    needed = {
        key: max(term(key).rows, term(key).rows_per_dimension * width) for key in in_order(metrics)
    }
    return ", ".join(f"{term(key).name} ({n:,.0f})" for key, n in needed.items() if n > num_rows)


def finding_lines(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """What makes the headlines of one measurement: a line for each kind, of the layer where what is
    left out holds most of the variance, with the names of the others and what to do; and one on few
    rows, of the layer with the fewest.

    >>> finding_lines([])
    []
    """
    values: dict[str, dict[str, float]] = {}
    errors: dict[str, dict[str, float]] = {}
    widths: dict[str, int] = {}
    for record in records:
        widths[record["layer"]] = record["width"]
        values.setdefault(record["layer"], {})[record["metric"]] = record["value"]
        errors.setdefault(record["layer"], {})[record["metric"]] = record["stderr"]
    found = [
        (
            remedy,
            share,
            {at: finding(values[at], errors[at], kind) for at in values},
        )
        for kind, (_, remedy, share, *_) in KINDS.items()
    ]
    few = {at: few_rows(own.get("n", inf), widths[at], own) for at, own in values.items()}
    of_few = {at: f"{values[at]['n']:,.0f} rows, too few for {few[at]}" for at in few if few[at]}
    lines = []
    for remedy, share, known in (*found, (MORE_ROWS, "n", of_few)):
        layers = [layer for layer, sentence in known.items() if sentence]
        if layers:
            most = min if share == "n" else max
            worst = most(layers, key=lambda layer: values[layer].get(share, 0.0))
            others = listed([layer for layer in layers if layer != worst], _MOST_NAMED)
            also = f" (also at {others})" if others else ""
            lines.append(f"{worst}: {known[worst]}{also}. {remedy}")
    return lines
