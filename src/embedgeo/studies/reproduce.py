"""The command ``embedgeo reproduce``: verdicts on a paper's claims from the folder of a sweep, and
their page.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby
from math import ceil, inf, isfinite, isnan, nan, sqrt
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import pandas as pd
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from numpy.typing import NDArray

from embedgeo.formatting import listed, number, with_error
from embedgeo.functional import REGRESSION_COUNT_RANGE, type_regressions
from embedgeo.functional.jackknife import standard_error
from embedgeo.glossary import term
from embedgeo.layer_names import is_input, side
from embedgeo.presets import preset
from embedgeo.report import write_report
from embedgeo.report.runs import Run, read_folder, with_baseline
from embedgeo.results.files import replacing
from embedgeo.results.folder import SweepFolder
from embedgeo.studies.claims import LEAST_SLOPE, LEAST_TAU, RULES, VISIBLE, Claim, Paper
from embedgeo.studies.sections import report_sections
from embedgeo.studies.token_types import Types, chosen_types, text_lengths, types_of
from embedgeo.sweep import SweepSettings

HOLDS = "holds"
FAILS = "does not hold"
OPEN = "not comparable"
_OF_PRINTED = (
    "unit",
    "min_words",
    "max_words",
    "special_tokens",
    "count_special",
    "rows",
    "types",
    "count_range",
    "skip_first_positions",
)
_OF_COUNTS = ("sample", "seq_len")  # beside these
# rules about printed values, which another text gives otherwise
_PRINTED = ("value", "token", "count")
_GROUPS = 32  # of token types, for standard errors over them
_LARGEST_SHARE = 0.25  # of a printed value that z standard errors may be
_LEAST_LAYERS = 4  # of which Kendall's τ can be two of its standard errors
_KINDS = {HOLDS: "holds", FAILS: "fails", OPEN: "open"}  # as the page's style calls them
# of all models, in the report
_TOGETHER = {"profile": "compared-profiles", "dynamics": "compared-dynamics"}
_TOO_FEW = "; not enough tokens to tell"
_DECODERS = ("ForCausalLM", "LMHeadModel")


class Verdict(NamedTuple):
    """A verdict, the reason, and the numbers that it rests on; NaN where there are none."""

    verdict: str
    why: str
    measured: float = nan
    error: float = nan
    difference: float = nan
    error_of_difference: float = nan
    where: str = ""  # the layers or steps that were measured


@dataclass(frozen=True)
class Measured:
    """A run of the sweep as claims are about it."""

    run: Run
    model: str  # what follows the last slash of its name
    group: str  # encoder, decoder, or unknown
    settings: SweepSettings
    asked: Mapping[str, Any]  # the options of the preset
    text: Mapping[str, Any]  # what the manifest has of its text

    @property
    def layers(self) -> list[str]:
        """Its layers from the input up; none for a model of two sides, which has two such ways."""
        return self.run.depth if len({side(layer) for layer in self.run.depth}) == 1 else []

    @property
    def unlike_rows(self) -> str:
        """The kind of rows, if it is not that of the preset, in words."""
        rows = self.asked.get("rows", "tokens")
        return (
            ""
            if self.settings.rows == rows
            else f"other rows: rows is {self.settings.rows!r}, the preset has {rows!r}"
        )

    def unlike(self, options: Sequence[str]) -> str:
        """The first difference from the preset in the text or one of these options, in words; empty
        without one.
        """
        of_paper = SweepSettings(**self.asked)
        if [*self.settings.texts] != [*of_paper.texts]:
            names = listed([Path(text).name for text in self.settings.texts], 2)
            return f"another text: {names or 'the built-in one'}"
        for name in options:
            here, there = getattr(self.settings, name), getattr(of_paper, name)
            if here != there:
                return f"other rows: {name.replace('_', ' ')} is {here!r}, the preset has {there!r}"
        return ""

    def layer(self, name: str) -> str:
        """A layer by name; ``middle`` is the paper's, of which L / 2 blocks are below, ``last`` the
        last one.
        """
        stream = [layer for layer in self.layers if not layer.endswith("final_norm")] or self.layers
        if name not in ("middle", "last") or not stream:
            return name
        return stream[len(stream) // 2] if name == "middle" else self.layers[-1]

    def last_value(self, metric: str, layer: str) -> tuple[float, float]:
        """Value and standard error of a metric at a layer of the last step; NaN where there is
        none.
        """
        if metric not in self.run.values or layer not in self.run.layers:
            return nan, nan
        value = float(self.run.table(metric)[layer].iloc[-1])
        error = float(self.run.table(metric, self.run.errors)[layer].iloc[-1])
        if isnan(error):
            error = type_errors(self.types(layer)).get(metric, nan)
        return value, error

    def baseline(self, metric: str, layer: str) -> float:
        """The value of Gaussian rows with the same counts at a layer of the last step; NaN where
        that is not known.
        """
        if metric not in self.run.values or layer not in self.run.layers:
            return nan
        return float(
            self.run.table(metric, with_baseline(self.run, metric).baseline)[layer].iloc[-1]
        )

    @cached_property
    def known_types(self) -> Types | None:
        """The token types of the last checkpoint, if it has a table of them."""
        return types_of(self.run)

    def types(self, layer: str) -> pd.DataFrame:
        """The table of token types at a layer of the last checkpoint; empty where there is none."""
        if (known := self.known_types) is None:
            return pd.DataFrame(columns=["token_id", "token", "n", "Q", "M", "V"])
        return known.table[known.table["layer"] == layer]

    def errors(self, metric: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Standard errors of a metric, and of its means over blocks: the jackknife's, or from the
        spread of batches.
        """
        table, errors = self.run.table(metric), self.run.table(metric, self.run.errors)
        if self._has_spread(metric):
            spread = self.run.table(term(metric).spread)
            errors = spread.where(table.notna() & (spread >= 0)) / sqrt(self._batches(metric))
        return errors, self.run.mean_errors(table, errors)

    def _has_spread(self, metric: str) -> bool:
        """Test for a spread over batches where there are no standard errors."""
        spread = term(metric).spread
        return spread in self.run.values and not self.run.errors[metric].notna().any()

    @cached_property
    def _groups(self) -> dict[str, pd.DataFrame]:
        """Deviations of the jackknife's groups by metric: a row for each step and layer, and a
        column for each group.
        """
        parts = {}
        for step in self.run.steps_of("jackknife"):
            table = self.run.read("jackknife", step)
            table = table.drop_duplicates(["layer", "metric", "group"])
            index = ["metric", "layer"]
            parts[step] = table.pivot(index=index, columns="group", values="deviation")
        if not parts:
            return {}
        of_metrics = pd.concat(parts, names=["step"]).groupby("metric")
        return {str(metric): of_metric.droplevel("metric") for metric, of_metric in of_metrics}

    def deviations_of_blocks(self, metric: str, steps: Sequence[int]) -> NDArray[np.float64] | None:
        """The `deviations` of the first mean over blocks, shape (steps, groups), where they are
        known of all its blocks.
        """
        blocks = next(iter(self.run.blocks.values()))
        known = self.deviations(metric, [(step, block) for step in steps for block in blocks])
        if known is None or known.shape[1] < 2:
            return None
        return known.reshape(len(steps), len(blocks), -1).mean(axis=1)

    def deviations(
        self, metric: str, places: Sequence[tuple[int, str]]
    ) -> NDArray[np.float64] | None:
        """Deviations of the jackknife's groups of a metric at steps and layers; None where any is
        not known.
        """
        if metric not in self._groups or not places:
            return None
        found = (
            self._groups[metric].reindex(pd.MultiIndex.from_tuples(places)).to_numpy(dtype=float)
        )
        return found if np.isfinite(found).all() else None

    def degrees(self, metric: str) -> float:
        """Degrees of freedom of the standard errors of a metric: the groups or batches that they
        are from, less one.
        """
        if self.settings.jackknife:
            of_groups = self._groups.get(metric, pd.DataFrame()).fillna(0.0)
            return max(1, (int(of_groups.ne(0).any().sum()) or self.settings.jackknife) - 1)
        return max(1, (self._batches(metric) if self._has_spread(metric) else _GROUPS) - 1)

    def _batches(self, metric: str) -> float:
        of_dimension = term(metric).spread == "intrinsic_dimension_std"
        return (
            self.settings.id_batches
            if of_dimension
            else self.run.num_rows // self.settings.anisotropy_batch
        )


def type_errors(types: pd.DataFrame) -> dict[str, float]:
    """Standard errors of numbers over token types, in the range of the regressions, without groups
    of types in turn.
    """
    types = types[types["n"].between(*REGRESSION_COUNT_RANGE)].sort_values("token_id")
    if len(types) < 2 * _GROUPS:
        return {}
    columns = {key: torch.tensor(types[key].to_numpy(dtype=float)) for key in "nQMV"}
    groups = torch.arange(len(types)) % _GROUPS
    parts = [
        type_regressions({key: each[groups != i] for key, each in columns.items()})
        for i in range(_GROUPS)
    ]
    sizes = groups.bincount(minlength=_GROUPS)
    whole = type_regressions(columns)
    return {
        key: float(standard_error(value, torch.stack([part[key] for part in parts]), sizes))
        for key, value in whole.items()
    }


Errors = Sequence[float] | NDArray[np.float64]
"""Standard errors of some values, or their deviations, shape (values, groups), of which pairs of
values have errors.
"""


def _own_and_of_difference(
    errors: Errors,
) -> tuple[Callable[[int], float], Callable[[int, int], float]]:
    """The standard error of a value, and that of the difference of two, by their places."""
    given = np.asarray(errors, dtype=float)
    if given.ndim == 1:
        return lambda i: float(given[i]), lambda i, j: float(np.hypot(given[i], given[j]))
    return lambda i: float(np.linalg.norm(given[i])), lambda i, j: float(
        np.linalg.norm(given[i] - given[j])
    )


def exceeds(difference: float, error: float, visible: float, z: float) -> str:
    """Verdict on a difference that should be above 0, and would be ``visible`` if it were what the
    paper shows.
    """
    if not (isfinite(difference) and isfinite(error)):
        return OPEN
    if difference > z * error:
        return HOLDS
    return FAILS if difference + z * error < visible else OPEN


def widened(choices: int, degrees: float = inf) -> float:
    """Number of standard errors that the largest of so many differences exceeds by chance in one
    case of forty.

    By Student's t: errors from G groups have G - 1 degrees of freedom.
    """
    from scipy import stats

    return float(stats.t.isf(0.025 / max(1, choices), degrees))


def peak(
    values: Sequence[float],
    errors: Errors,
    names: Sequence[object] = (),
    degrees: float = inf,
    *,
    in_the_middle: bool = False,
) -> Verdict:
    """Verdict on values that rise to a peak between their ends, or in the middle half, and fall
    again; with names.
    """
    own, of_difference = _own_and_of_difference(errors)
    last = len(values) - 1
    if last < 2:
        return Verdict(OPEN, f"a peak between two ends needs three values; there are {last + 1}")
    first, end_of_middle = (ceil(last / 4), last * 3 // 4) if in_the_middle else (1, last - 1)
    top = first + int(np.argmax(values[first : end_of_middle + 1]))
    outside = max(
        (i for i in range(1, last) if not first <= i <= end_of_middle),
        key=lambda i: values[i],
        default=top,
    )
    z = widened(last - 1, degrees)
    differences = {end: values[top] - values[end] for end in (0, last)}
    end = min(differences, key=lambda i: differences[i])
    verdicts = [
        exceeds(differences[i], of_difference(top, i), VISIBLE * abs(values[i]), z)
        for i in differences
    ]
    names = names or range(1, len(values) + 1)
    of_top = "of the middle half" if in_the_middle else "between the ends"
    other = "the larger end"
    if values[outside] > values[top]:
        verdicts.append(
            FAILS if values[outside] - values[top] > z * of_difference(top, outside) else OPEN
        )
        if _weakest(verdicts) == verdicts[-1]:
            end, other = outside, "a larger value outside of it"
            differences[end] = values[top] - values[end]
    verdict = _weakest(verdicts)
    error = of_difference(top, end)
    why = f"the largest value {of_top}, at {names[top]}, less {other}, at {names[end]}, z = {z:.2f}"
    return Verdict(
        verdict, why + _why_open(verdict, error), values[top], own(top), differences[end], error
    )


def phase(
    values: Sequence[float],
    errors: Errors,
    which: int,
    steps: Sequence[object] = (),
    degrees: float = inf,
) -> Verdict:
    """Verdict on one of three phases of values over steps: they fall, grow and fall again."""
    own, of_difference = _own_and_of_difference(errors)
    if len(values) < 4:
        return Verdict(OPEN, f"three phases need four steps; there are {len(values)}")
    pairs = [(i, j) for i in range(len(values) - 1) for j in range(i + 1, len(values))]
    low, high = max(pairs, key=lambda pair: values[pair[1]] - values[pair[0]])
    start, end, sign = {1: (0, low, -1), 2: (low, high, 1), 3: (high, len(values) - 1, -1)}[which]
    # both ends are chosen, or one
    z = widened(len(pairs) if which == 2 else len(values) - 1, degrees)
    spans = [(start, end)]
    # the one of those that the growth leaves no room for that its errors leave most room for
    if start == end:
        spans = [(low, i) if which == 1 else (i, high) for i in range(low, high + 1) if i != start]

    def most(span: tuple[int, int]) -> float:
        i, j = span
        room = sign * (values[j] - values[i]) + z * of_difference(i, j)
        return inf if isnan(room) else room

    start, end = max(spans, key=most)
    change = values[end] - values[start]
    error = of_difference(start, end)
    verdict = exceeds(sign * change, error, VISIBLE * max(abs(values[start]), abs(values[end])), z)
    steps = steps or range(1, len(values) + 1)
    why = f"from step {steps[start]} to step {steps[end]}, z = {z:.2f}" + _why_open(verdict, error)
    return Verdict(verdict, why, values[end], own(end), change, error)


def trend(
    values: Sequence[float], direction: str, errors: Sequence[float] = (), degrees: float = inf
) -> Verdict:
    """Verdict on values that grow (``up``) or fall (``down``) through the layers, by Kendall's
    τ.
    """
    count = len(values)
    if count < _LEAST_LAYERS:
        return Verdict(OPEN, f"a trend needs {_LEAST_LAYERS} layers; there are {count}")
    signs = [np.sign(values[j] - values[i]) for i in range(count) for j in range(i + 1, count)]
    tau = float(np.mean(signs))
    error = sqrt(2 * (2 * count + 5) / (9 * count * (count - 1)))
    why = f"Kendall's τ over {count} layers; none would be 0"
    verdict = exceeds(tau if direction == "up" else -tau, error, LEAST_TAU, 2)
    blur = widened(len(signs), degrees) * sqrt(2) * float(np.max(errors)) if errors else 0.0
    if verdict == OPEN:
        why += "; too few layers to tell"
    elif isnan(blur):
        is_opposite = exceeds(-tau if direction == "up" else tau, error, LEAST_TAU, 2) == HOLDS
        if verdict == FAILS and not is_opposite:  # few tokens may have hidden one
            verdict = OPEN
            why += _why_open(verdict, blur)
    elif max(values) - min(values) <= blur and (
        verdict == HOLDS or blur >= VISIBLE * float(np.max(np.abs(values)))
    ):
        verdict = OPEN
        why += _TOO_FEW
    return Verdict(verdict, why, tau, error, tau, error)


def flatter(
    span: float,
    error: float,
    others: Sequence[tuple[float, float]],
    num_layers: int,
    degrees: float = inf,
) -> Verdict:
    """Verdict on a span over the layers that is less than the mean of others, of at most so many
    layers.

    Noise alone makes a span, of each of the others too: the error of their mean is taken as that of
    one of them.
    """
    mean, error_of_mean = (float(np.mean(each)) for each in zip(*others, strict=True))
    both = sqrt(error**2 + error_of_mean**2)
    z = widened(num_layers * (num_layers - 1) // 2, degrees)  # both ends of a span are chosen
    verdict = exceeds(mean - span, both, VISIBLE * mean, z)
    why = f"its span less the mean span of {len(others)} others, {number(mean)}, z = {z:.2f}"
    return Verdict(verdict, why + _why_open(verdict, both), span, error, span - mean, both)


def printed_value(claim: Claim, measured: float, error: float, degrees: float = inf) -> Verdict:
    """Verdict on a value that the paper prints."""
    z = widened(1, degrees)
    difference = measured - claim.number
    numbers = (measured, error, difference, error)
    if not (isfinite(measured) and isfinite(error)):
        return Verdict(
            OPEN, "no standard error: sweep with --jackknife 16 or --token-tables true", *numbers
        )
    if z * error > _LARGEST_SHARE * abs(claim.number):
        return Verdict(
            OPEN,
            f"not enough tokens: z errors are over {_LARGEST_SHARE:.0%} of the value",
            *numbers,
        )
    is_so = abs(difference) <= z * error + claim.rounding
    return Verdict(
        HOLDS if is_so else FAILS, f"within z errors and rounding, z = {z:.2f}", *numbers
    )


def _weakest(verdicts: Collection[str]) -> str:
    """The verdict on all of several."""
    return next(verdict for verdict in (FAILS, OPEN, HOLDS) if verdict in verdicts)


def _why_open(verdict: str, error: float) -> str:
    if verdict != OPEN:
        return ""
    return (
        "; no standard error: sweep with --jackknife 16, or more tokens"
        if isnan(error)
        else _TOO_FEW
    )


def judge(claim: Claim, measured: Measured, others: Sequence[Measured]) -> Verdict:
    """Verdict on a claim about one model; ``others`` are all that were measured with it."""
    options = (*_OF_PRINTED, *_OF_COUNTS) if claim.rule == "count" else _OF_PRINTED
    unlike = measured.unlike(options)
    reason = unlike if claim.rule in _PRINTED else measured.unlike_rows
    if claim.rule != "count" and not measured.layers:
        reason = "an encoder and its decoder: the paper has models of one side"
    if (
        not reason
        and claim.rule not in ("count", "token")
        and claim.metric not in measured.run.values
    ):
        reason = f"{claim.metric} was not measured"
    if reason:
        return Verdict(OPEN, reason)
    if claim.rule == "flatter":
        found = _flatter(claim, measured, others)
    else:
        found = _FOUND_BY[claim.rule](claim, measured)
    return found._replace(why=f"{found.why}; {unlike}") if unlike else found


def _through_layers(claim: Claim, measured: Measured) -> Verdict:
    """Verdict on the profile of a metric at the last step."""
    values = measured.run.table(claim.metric)[measured.layers].iloc[-1]
    errors = measured.errors(claim.metric)[0][measured.layers].iloc[-1]
    known = values.notna()
    numbers = values[known].tolist()
    widths = errors[known].tolist()
    degrees = measured.degrees(claim.metric)
    if claim.rule == "trend":
        found = trend(numbers, claim.direction, widths, degrees)
    else:
        layers = values[known].index.tolist()
        of_groups = measured.deviations(
            claim.metric, [(measured.run.steps[-1], layer) for layer in layers]
        )
        found = peak(
            numbers, widths if of_groups is None else of_groups, layers, degrees, in_the_middle=True
        )
    return found._replace(where=f"{len(numbers)} layers")


def _too_few(*needed: tuple[float, int, str]) -> str:
    """What there is less of than a claim needs, in words; empty where there is enough."""
    found = [
        f"{number(count)} {what}, and {least:,} are needed"
        for count, least, what in needed
        if least and not count >= least
    ]
    return f"not enough tokens: {'; '.join(found)}" if found else ""


def _count(claim: Claim, measured: Measured) -> Verdict:
    """Verdict on the number of token types, or of their occurrences."""
    text = measured.text
    if "num_types" not in text:
        return Verdict(OPEN, "the sweep has not counted them: it is one of an earlier version")
    if measured.settings.num_tokens - text["num_tokens"] < measured.settings.length:
        most = f"num tokens is {measured.settings.num_tokens:,}"
        return Verdict(OPEN, f"other rows: the sample may go on where they end, for {most}")
    if claim.metric == "types":
        value = float(text["num_types"])
        error = sqrt(2 * text["num_types_once"])
    else:
        value = float(text["num_ordinary_tokens"])
        lengths = text_lengths(measured.run) or {measured.settings.length: text["num_sequences"]}
        error = sqrt(2 * sum(count * length**2 for length, count in lengths.items()))
    where = f"{text['num_sequences']:,} texts"
    if why := _too_few((text["num_ordinary_tokens"], claim.least_rows, "rows")):
        return Verdict(OPEN, why, value, error, value - claim.number, error, where)
    return printed_value(claim, value, error)._replace(where=where)


def _token(claim: Claim, measured: Measured) -> Verdict:
    """Verdict on a value of one token type."""
    layer = measured.layer(claim.layer)
    types = measured.types(layer)
    found = types[types["token"].astype(str).str.strip() == claim.token]
    if found.empty:
        return Verdict(
            OPEN,
            f"the token {claim.token!r} does not occur, or token types were not kept",
            where=layer,
        )
    row = found.sort_values("n").iloc[-1]
    value = float(row[claim.metric])
    where = f"{layer}, n = {row['n']:,.0f}"
    difference = value - claim.number
    if why := _too_few((row["n"], claim.least_types, "occurrences")):
        return Verdict(OPEN, why, value, nan, difference, nan, where)
    is_so = abs(difference) <= claim.within * abs(claim.number) + claim.rounding
    return Verdict(
        HOLDS if is_so else FAILS, f"within {claim.within:.1%}", value, nan, difference, nan, where
    )


def _unprinted(claim: Claim, measured: Measured) -> Verdict:
    layer = measured.layer(claim.layer)
    value, error = measured.last_value(claim.metric, layer)
    why = (
        "the paper shows a picture; no number of it is known here"
        if isfinite(value)
        else "it has no value here"
    )
    if isfinite(value) and isfinite(random := measured.baseline(claim.metric, layer)):
        why += f". Gaussian rows, independent of their tokens: {number(random)}"
    return Verdict(OPEN, why, value, error, where=layer)


def _value(claim: Claim, measured: Measured) -> Verdict:
    """Verdict on a value at one layer."""
    layer = measured.layer(claim.layer)
    value, error = measured.last_value(claim.metric, layer)
    types = measured.last_value("token_types_regressed", layer)[0]
    rows = float(measured.text.get("num_ordinary_tokens", measured.run.num_rows))
    if why := _too_few(
        (types, claim.least_types, "token types in the regression"),
        (rows, claim.least_rows, "rows"),
    ):
        return Verdict(OPEN, why, value, error, value - claim.number, error, layer)
    return printed_value(claim, value, error, measured.degrees(claim.metric))._replace(where=layer)


def _below(claim: Claim, measured: Measured) -> Verdict:
    """Verdict on the sign of a value at one layer, or at all above the input."""
    layers = [measured.layer(claim.layer)]
    if claim.layer == "all":
        layers = [layer for layer in measured.layers if not is_input(layer)]
    values = {layer: measured.last_value(claim.metric, layer) for layer in layers}
    values = {layer: pair for layer, pair in values.items() if isfinite(pair[0])}
    if not values:
        return Verdict(
            OPEN,
            "no value: the token types that occur often enough are too few",
            where=listed(layers, 1),
        )
    z = widened(len(values), measured.degrees(claim.metric))
    verdicts = {
        layer: exceeds(-value, error, LEAST_SLOPE, z) for layer, (value, error) in values.items()
    }
    verdict = _weakest(verdicts.values())
    weakest = max(
        (layer for layer in verdicts if verdicts[layer] == verdict),
        key=lambda layer: values[layer][0],
    )
    value, error = values[weakest]
    why = f"less 0, z = {z:.2f}" + (
        f"; the weakest of {len(values)} layers" if len(values) > 1 else ""
    )
    return Verdict(verdict, why + _why_open(verdict, error), value, error, value, error, weakest)


def _flatter(claim: Claim, measured: Measured, others: Sequence[Measured]) -> Verdict:
    compared = [_span(claim.metric, each) for each in others if each.group == claim.than]
    compared = [pair for pair in compared if isfinite(pair[0])]
    span, error = _span(claim.metric, measured)
    if not compared:
        return Verdict(OPEN, f"no {claim.than} was measured beside it", span, error)
    most = max(len(each.layers) for each in (measured, *others))
    degrees = min(
        each.degrees(claim.metric)
        for each in (measured, *others)
        if claim.metric in each.run.values
    )
    return flatter(span, error, compared, most, degrees)._replace(
        where=f"{len(measured.layers)} layers"
    )


def _span(metric: str, measured: Measured) -> tuple[float, float]:
    """Largest less smallest value of a metric over the layers, and its standard error."""
    if metric not in measured.run.values or not measured.layers:
        return nan, nan
    values = measured.run.table(metric)[measured.layers].iloc[-1].dropna()
    if values.empty:
        return nan, nan
    errors = measured.errors(metric)[0][values.index].iloc[-1].to_numpy()
    ends = int(values.to_numpy().argmax()), int(values.to_numpy().argmin())
    of_groups = measured.deviations(
        metric, [(measured.run.steps[-1], layer) for layer in values.index]
    )
    _, of_difference = _own_and_of_difference(errors if of_groups is None else of_groups)
    return float(values.max() - values.min()), of_difference(*ends)


def _over_steps(claim: Claim, measured: Measured) -> Verdict:
    run = measured.run
    if not run.has_steps:
        return Verdict(OPEN, "a final model has no steps")
    table = run.table(claim.metric)
    errors, errors_of_means = measured.errors(claim.metric)
    if claim.rule == "phase":
        where = measured.layers[-1]
        values = table[where].dropna()
        steps = [int(step) for step in values.index]
        widths = errors.loc[steps, where]
        of_groups = measured.deviations(claim.metric, [(step, where) for step in steps])
    else:
        where = "mean over blocks"
        values = run.means(table).iloc[:, 0].dropna()
        steps = [int(step) for step in values.index]
        widths = errors_of_means.iloc[:, 0].loc[steps]
        of_groups = measured.deviations_of_blocks(claim.metric, steps)
    known = widths.tolist() if of_groups is None else of_groups
    sign = -1 if claim.rule == "phase" and claim.start == "up" else 1
    signed = (sign * values).tolist()
    at = [f"{step:,}" for step in steps]
    degrees = measured.degrees(claim.metric)
    if claim.rule == "phase":
        found = phase(signed, known, claim.phase, at, degrees)
    else:
        found = peak(signed, known, [f"step {step}" for step in at], degrees)
    where += f", steps {run.steps[0]:,} to {run.steps[-1]:,}" if run.steps else ""
    return found._replace(
        measured=sign * found.measured, difference=sign * found.difference, where=where
    )


def _peak(claim: Claim, measured: Measured) -> Verdict:
    find = _over_steps if claim.over == "steps" else _through_layers
    return find(claim, measured)


_FOUND_BY: Mapping[str, Callable[[Claim, Measured], Verdict]] = {
    "count": _count,
    "token": _token,
    "value": _value,
    "unprinted": _unprinted,
    "below": _below,
    "trend": _through_layers,
    "peak": _peak,
    "phase": _over_steps,
}
"""What finds a verdict, by rule; `_flatter` needs all runs."""


class Row(NamedTuple):
    """A row of the page: a claim about a model, with its verdict; no model where none was
    measured.
    """

    claim: Claim
    model: str
    found: Verdict


def rows(paper: Paper, measured: Sequence[Measured], drawn: Sequence[str] = ()) -> list[Row]:
    """A row of each claim for each model that it is about; one that says why, where there is none.

    Args:
        paper: its claims.
        measured: the runs.
        drawn: names of the figures of their report.
    """
    found = []
    models = [each.model for each in measured]
    for claim in paper.claims:
        if claim.rule == "picture":
            why = "nothing that is measured belongs to it"
            if claim.shown:
                why = (
                    "a picture, for you to compare"
                    if shown(claim, drawn)
                    else "it is of what was not measured"
                )
            found.append(Row(claim, "", Verdict(OPEN, why)))
            continue
        about = [each for each in measured if not claim.models or each.model in claim.models]
        about = [each for each in about if not claim.group or each.group == claim.group]
        for each in about:
            name = each.model if models.count(each.model) == 1 else each.run.label
            found.append(Row(claim, name, judge(claim, each, measured)))
        if not about:
            what = (
                listed(claim.models)
                or f"a model known to be {'an' if claim.group[:1] == 'e' else 'a'} {claim.group}"
            )
            found.append(Row(claim, "", Verdict(OPEN, f"another model: {what} was not measured")))
    return found


def shown(claim: Claim, drawn: Sequence[str]) -> list[str]:
    """Those of the names of a report's figures that show what a claim is about."""
    found = list[str]()
    for name in claim.shown:
        metric, _, kind = name.rpartition("-")
        for each in (f"{metric}-{_TOGETHER.get(kind, kind)}", name):
            if of_name := [
                figure
                for figure in drawn
                if fnmatchcase(figure, each) or fnmatchcase(figure, f"*-{each}")
            ]:
                found += of_name
                break
    return found


def read_measured(settings: SweepSettings, name: str) -> list[Measured]:
    """The runs in the folder of a sweep as claims of a paper are about them."""
    folder = SweepFolder(settings.folder)
    classes = {
        str(folder.read(checkpoint)["model"].iloc[0]): folder.facts(checkpoint).get(
            "model_class", ""
        )
        for checkpoint in folder.done()
    }
    asked = preset(name)
    text = folder.manifest().get("text", {})
    order = [model.rstrip("/") for model in settings.models]
    measured = []
    for run in read_folder(folder.path):
        if run.values.empty:
            continue
        full_name = str(run.checkpoints["model"].iloc[-1])
        model = full_name.rstrip("/")
        kind = classes.get(full_name, "")
        by_class = ""
        if kind.endswith(_DECODERS):
            by_class = "decoder"
        elif kind.endswith("ForMaskedLM"):
            by_class = "encoder"
        place = order.index(model) if model in order else len(order)
        of_model = text if "sha256" in text else text.get(full_name, {})
        group = run.group or by_class
        one = Measured(run, Path(model).name, group, settings, asked, of_model)
        measured.append((place, one))
    return [each for _, each in sorted(measured, key=itemgetter(0))]


_COLUMNS = {
    "at": "claim.at",
    "claim": "claim.claim",
    "model": "model",
    "where": "found.where",
    "metric": "claim.metric",
    "printed": "claim.printed",
    "measured": "found.measured",
    "stderr": "found.error",
    "difference": "found.difference",
    "difference_stderr": "found.error_of_difference",
    "verdict": "found.verdict",
    "why": "found.why",
    "rule": "claim.rule",
    "source": "claim.source",
}


def as_table(found: Sequence[Row]) -> pd.DataFrame:
    """The rows as a table of plain columns."""
    columns = {name: [*map(attrgetter(path), found)] for name, path in _COLUMNS.items()}
    printed = [row.claim.number if row.claim.printed else nan for row in found]
    return pd.DataFrame(columns | {"printed": printed})


@rank_zero_only
def write_comparison(paper: Paper, settings: SweepSettings) -> None:
    """Write ``reproduce/<paper>.html`` and ``.csv`` into the folder of a sweep, and print the
    verdicts.

    Beside them, in ``reproduce/<paper>/``, is the report at the layers that the paper draws. The
    page shows its figures.
    """
    folder = SweepFolder(settings.folder)
    if not folder.done():
        print(f"{folder.path}: nothing was measured that could be compared with {paper.name}")
        return
    measured = read_measured(settings, paper.name)
    page = folder.path / "reproduce" / f"{paper.name}.html"
    tokens = dict.fromkeys(claim.token for claim in paper.claims if claim.token)
    known = [each.known_types for each in measured if each.known_types]
    names = [token for token in tokens if any(len(chosen_types(each, [token])) for each in known)]
    sections = report_sections(names or None, layers=paper.layers)
    report = write_report([folder.path], page.with_suffix(""), sections=sections)
    pictures = {path.stem: path for path in sorted((report.parent / "figures").glob("*.png"))}
    found = rows(paper, measured, [*pictures])
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("embedgeo.studies", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    with replacing(page.with_suffix(".csv")) as temporary:
        as_table(found).to_csv(temporary, index=False)
    counts = {
        verdict: sum(row.found.verdict == verdict for row in found)
        for verdict in (HOLDS, FAILS, OPEN)
    }
    with replacing(page) as temporary:
        text = environment.get_template("reproduce.html.jinja").render(
            paper=paper,
            counts=counts,
            claims=[
                (
                    claim,
                    [(row, _cells(row)) for row in of_claim],
                    {
                        name: pictures[name].relative_to(page.parent).as_posix()
                        for name in shown(claim, [*pictures])
                    },
                )
                for claim, of_claim in groupby(found, key=attrgetter("claim"))
            ],
            kinds=_KINDS,
            rules=[RULES[rule][1] for rule in dict.fromkeys(row.claim.rule for row in found)],
            facts={
                "models": listed(settings.models),
                "text": listed([*settings.texts]) or "the built-in one",
                "unit": settings.unit,
                "jackknife": f"{settings.jackknife} groups" if settings.jackknife else "none",
            },
            report=report.relative_to(page.parent).as_posix(),
        )
        temporary.write_text(text, encoding="utf-8", errors="replace")
    print(*_lines(found), sep="\n")
    print(f"{page}: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}")


def _cells(row: Row) -> dict[str, str]:
    """The numbers of a row as text."""
    found = row.found

    def cell(value: float, error: float) -> str:
        text = with_error(value, error if isfinite(error) else inf) if isfinite(value) else "–"
        return text.replace("-", "−")

    return {
        "paper": row.claim.printed.replace("-", "−") or "–",
        "measured": cell(found.measured, found.error),
        "difference": cell(found.difference, found.error_of_difference),
    }


def _lines(found: Sequence[Row]) -> Iterator[str]:
    """A line of each verdict that could be found, for the terminal."""
    decided = [row for row in found if row.found.verdict != OPEN]
    width = max((len(row.claim.at) for row in decided), default=0)
    for row in decided:
        cells = _cells(row)
        numbers = (
            f"paper {cells['paper']}, here {cells['measured']}"
            if row.claim.printed
            else cells["difference"]
        )
        about = f"{row.claim.claim} [{row.model}]"
        yield f"  {row.found.verdict:<{len(FAILS)}}  {row.claim.at:<{width}}  {about}: {numbers}"
