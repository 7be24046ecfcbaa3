"""Which few rows, first positions or single coordinate make a layer's headlines, in words."""

from collections.abc import Iterable, Iterator, Mapping
from math import isnan, log, nan, sqrt
from typing import Any

from embedgeo.formatting import listed, number
from embedgeo.glossary import term

MOVED, MOVED_ERRORS = 0.1, 2
"""The share of itself, and the number of standard errors, by which a headline has to move."""
REMEDIES = {
    "large_rows": "Leave large rows out by skip_massive= (--skip-massive).",
    "first_positions": "Leave first positions out by skip_first_positions=1 "
    "(--skip-first-positions 1); --special-tokens default begins each sequence as the model knows "
    "it.",
    "top_dim": "Read anisotropy_standardized and anisotropy_without_top_dim (spectrum).",
}
"""What to do, by kind: as `embedgeo.metrics.left_out` has them."""

# V_W / V without a coordinate is known of the types' means alone
_HEADLINES = ("V_W_over_V_unbiased", "V_W_over_V", "M_over_Q", "anisotropy", "V")
_LEAST = 0.01  # by which a share has to move
_MOST_NAMED = 4  # layers
_HELD = 128  # rows, those of largest norm, that are left out at most
# what is left out by what has the number of its rows
_ROWS = {
    "large_rows": ("large_rows",),
    "first_positions": ("first_positions",),
    "both": ("large_rows", "first_positions"),
}
# share of V of a coordinate, as in `embedgeo.metrics.left_out`, from which it is named
_OPEN = 0.05

Values = Mapping[str, float]


def findings(values: Values, width: int, errors: Values | None = None) -> dict[str, str]:
    """What makes the numbers of a layer: a sentence for each kind that does.

    One does where, without it, V_W / V, M / Q, the anisotropy or V moves by more than a tenth of
    itself and two standard errors: of all rows, and where several kinds do, without those before.
    Without a coordinate, the error is that of the headline: of independent Gaussian rows
    (`approximate_error`), or the jackknife's where that is smaller. Without rows it is that of what
    leaving out as many of Gaussian rows does, be they the largest.

    Args:
        values: numbers by key, with those of `embedgeo.metrics.left_out`.
        width: d.
        errors: their standard errors by the jackknife, where they are known.

    Returns:
        By kind, "5 rows of 8,160 hold 53 % of the variance; without them V_W / V is 0.27, not
        0.68", for example. Empty where the numbers are nobody's, and where it is not known.
    """
    errors = errors or {}
    found: dict[str, str] = {}
    n = values.get("n", 0.0)
    large, every = values.get("large_rows", 0.0), n * values.get("large_norm_rows", 0.0)
    more = f" (the largest of {every:,.0f} beyond 4 times the median norm)" if every > _HELD else ""
    before = ""  # what has been left out so far
    beginnings = {
        "large_rows": f"{large:,.0f} {'row' if large == 1 else 'rows'} of {n:,.0f}{more} "
        f"{'holds' if large == 1 else 'hold'} "
        f"{values.get('large_rows_share', 0):.0%} of the variance",
        "first_positions": f"first positions hold {values.get('first_positions_share', 0):.0%} of "
        "the variance",
    }
    for kind, beginning in beginnings.items():
        told = _told(values, errors, "", kind)
        then = _told(values, errors, "large_rows", "both") if before else ""
        if told and then:
            told += f"; without these and the large rows {then}"
        if told:
            found[kind] = f"{beginning}; without them {told}"
            before = "both" if before else kind
    if not found and (told := _told(values, errors, "", "both")):
        found["large_rows"] = (
            f"{beginnings['large_rows']}, and {beginnings['first_positions']}; without both {told}"
        )
        before = "both"
    share, of_mean = values.get("top_dim_share", 0.0), _share_of_mean(values)
    is_large = max(share, of_mean) > max(_OPEN, 4 / max(1, width))
    if is_large and (told := _told(values, errors, "", "top_dim")):
        found["top_dim"] = (
            f"coordinate {values.get('V_top_coordinate', 0):.0f} holds {share:.0%} of the variance"
            f"{f' and {of_mean:.0%} of M' if of_mean > share else ''}; without it {told}"
            f"{_standardized(values)}"
        )
    if before:
        whole, others = (values.get(f"V_without_{each}", 0.0) for each in ("both", "all"))
        share = 1 - others / whole if whole else 0.0
        stands_out = share > max(_OPEN, 4 / max(1, width))
        if stands_out and (told := _told(values, errors, "both", "all")):
            at = values.get("V_without_rows_top_coordinate", 0)
            text = (
                f"without large rows and first positions coordinate {at:.0f} holds {share:.0%} of "
                f"the variance; without it, too, {told}"
            )
            found["top_dim"] = "; ".join(filter(None, (found.get("top_dim"), text)))
    return found


def _share_of_mean(values: Values) -> float:
    """The share of M of the coordinate with the largest share of V: what is not in the M that V and
    M / Q without it tell.
    """
    variance, share = (values.get(f"{key}_without_top_dim", nan) for key in ("V", "M_over_Q"))
    mean = values.get("M", 0.0)
    return 1 - variance * share / (1 - share) / mean if share < 1 and mean else nan


def _told(values: Values, errors: Values, before: str, what: str) -> str:
    """The headlines that move where this is left out, with their values; empty if none does.

    V, whose share has been told, is named where it moves alone.
    """
    told = []
    for key in _HEADLINES:
        if key == "V_W_over_V" and what in _ROWS:
            continue
        old = values.get(f"{key}_without_{before}" if before else key, nan)
        new = values.get(f"{key}_without_{what}", nan)
        error, jackknife = approximate_error(key, values, what), errors.get(key, nan)
        if what in _ROWS:
            error *= _times_of_move(key, values, before, what)
        elif not isnan(jackknife):
            error = min(error, jackknife)
        if _is_moved(key, old, new, error):
            told.append(f"{term(key).name} is {number(new)}, not {number(old)}")
    return ", ".join(told[:-1] if len(told) > 1 and told[-1].startswith("V is") else told)


def _is_moved(key: str, old: float, new: float, error: float) -> bool:
    if isnan(old) or isnan(new):
        return False
    least = 0.0 if key == "V" else _LEAST
    return abs(new - old) > max(MOVED * abs(old), MOVED_ERRORS * error, least)


def _times_of_move(key: str, values: Values, before: str, what: str) -> float:
    """Standard error of what leaving out k of n rows does to a headline, by that of the headline.

    Numbers of n independent rows and of n - k of them differ by √(k / (n - k)) times the error of
    one of them; V_W / V rests on n - T rows, for T types. Rows may be left out for their size: the
    k largest of n squares of a Gaussian are on average up to 1 + 2 ln(n / k) times as large as
    all of them, and so may be what they do. The jackknife's error does not serve: all its groups
    have the same types, and where these are few it is too small by far.
    """
    n = values.get("n", 0.0)
    k = max(1.0, sum(values.get(kind, 0.0) for kind in _ROWS[what] if kind != before))
    types = values.get("token_types", 0.0) if key == "V_W_over_V_unbiased" else 0.0
    return sqrt(k / max(1.0, n - types - k)) * (1 + 2 * log(max(1.0, n / k)))


def approximate_error(key: str, values: Values, what: str) -> float:
    """Standard error of a headline without something, of independent Gaussian rows of Zipf types;
    NaN where it is not known.

    With a, the anisotropy of what is left, Σλ² is at most a (Σλ)². So the relative variance of V is
    at most 2a / n; the variance of r = M / Q is at most (4 r (1 - r) a + 2 (1 - r)² a / n) / n, for
    that of M is 4 μᵀΣμ / n + 2 tr Σ² / n²; that of the anisotropy is at most 2 a² (1 - a) / n, for
    λ₁ and the trace go together. Rows of one type are alike: with w = V_W / V, 1 / n is w² / n + (1
    - w)² / √T, for some √T of T types have most rows. The relative variance of w is 2a (2 / (n - T)
    + (1 - w)² / √T), for n - T rows at most have another of their type, and not all count alike.
    Where a is unknown, it is 1.
    """

    def found(name: str) -> float:
        value = values.get(f"{name}_without_{what}", nan)
        return values.get(name, nan) if isnan(value) else value

    n, value = values.get("n", 0.0), values.get(f"{key}_without_{what}", nan)
    if n <= 1:
        return nan
    a = values.get(f"anisotropy_without_{what}", nan)
    a = 1.0 if isnan(a) else a
    is_share = key.startswith("V_W_over_V")
    between = min(max(0.0, 1 - found(key if is_share else "V_W_over_V_unbiased")), 1.0)
    of_types = between**2 / sqrt(max(1.0, values.get("token_types", 1.0)))
    if is_share:
        return value * sqrt(2 * a * (2 / max(1.0, n - values.get("token_types", 1.0)) + of_types))
    of_rows = 1 / n if isnan(of_types) else (1 - between) ** 2 / n + of_types
    if key == "V":
        return value * sqrt(2 * a * of_rows)
    if key == "M_over_Q":
        rest = max(0.0, 1 - value)
        return sqrt((4 * value * rest * a + 2 * rest**2 * a * of_rows) * of_rows)
    return value * sqrt(2 * max(0.0, 1 - value) * of_rows)


def _standardized(values: Values) -> str:
    value = values.get("anisotropy_standardized", nan)
    return "" if isnan(value) else f" ({term('anisotropy_standardized').name}: {number(value)})"


def lines(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """What makes the numbers of one measurement: a line for each kind, of the layer of which it
    holds most, with the others' names and what to do.

    >>> lines([])
    []
    """
    layers: dict[str, tuple[int, dict[str, float], dict[str, float]]] = {}
    for record in records:
        _, values, errors = layers.setdefault(record["layer"], (record["width"], {}, {}))
        values[record["metric"]] = record["value"]
        errors[record["metric"]] = record["stderr"]
    return [*_lines(layers)]


def _lines(layers: Mapping[str, tuple[int, Values, Values]]) -> Iterator[str]:
    found = {
        layer: findings(values, width, errors) for layer, (width, values, errors) in layers.items()
    }
    shares = {
        "large_rows": "large_rows_share",
        "first_positions": "first_positions_share",
        "top_dim": "top_dim_share",
    }
    for kind, remedy in REMEDIES.items():
        where = [layer for layer, of_layer in found.items() if kind in of_layer]
        if where:
            worst = max(where, key=lambda layer: layers[layer][1].get(shares[kind], 0.0))
            others = listed([layer for layer in where if layer != worst], _MOST_NAMED)
            also = f" (also at {others})" if others else ""
            yield f"{worst}: {found[worst][kind]}{also}. {remedy}"
