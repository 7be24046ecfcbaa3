"""The command ``embedgeo reproduce``: verdicts on a paper's claims from the folder of a sweep, and
their page.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import groupby
from math import inf, isfinite, nan, sqrt
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
from embedgeo.functional import REGRESSION_COUNT_RANGE, least_squares, type_regressions
from embedgeo.glossary import term
from embedgeo.layer_names import is_input, side
from embedgeo.presets import preset
from embedgeo.report import write_report
from embedgeo.report.runs import Run, read_folder, with_baseline
from embedgeo.results.files import replacing
from embedgeo.results.folder import SweepFolder
from embedgeo.studies.claims import LEAST_TYPES, RULES, VISIBLE, Claim, Paper
from embedgeo.studies.sections import report_sections
from embedgeo.studies.token_types import Types, chosen_types, text_lengths, types_of
from embedgeo.studies.verdicts import (
    FAILS,
    FEW,
    HOLDS,
    OPEN,
    Contrast,
    Series,
    Verdict,
    decide,
    falling,
    near,
    peak,
    phase,
    settles,
    trend,
)
from embedgeo.sweep import SweepSettings

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
_COUNTS = ("texts", "occurrences", "types")  # of the sample, not of a layer
_DRAWS = 100  # of token types, with replacement
_KINDS = {HOLDS: "holds", FAILS: "fails", FEW: "open", OPEN: "open"}  # as the page calls them
# of all models, in the report
_TOGETHER = {"profile": "compared-profiles", "dynamics": "compared-dynamics"}
_DECODERS = ("ForCausalLM", "LMHeadModel")


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

    def unlike_rows(self, rows: str) -> str:
        """The kind of rows, if it is neither this one nor, without it, that of the preset, in
        words.
        """
        asked = rows or self.asked.get("rows", "tokens")
        return (
            ""
            if self.settings.rows == asked
            else f"other rows: rows is {self.settings.rows!r}, the paper has {asked!r}"
        )

    def unlike(self, options: Sequence[str]) -> str:
        """The first difference from the preset in the text or one of these options, in words; empty
        without one.
        """
        of_paper = SweepSettings(**self.asked)
        if [*self.settings.texts] != [*of_paper.texts]:
            names = listed([Path(text).name for text in self.settings.texts], 2)
            return f"another text than the preset's: {names or 'the built-in one'}"
        for name in options:
            here, there = getattr(self.settings, name), getattr(of_paper, name)
            if here != there:
                return f"other rows: {name.replace('_', ' ')} is {here!r}, the preset has {there!r}"
        return ""

    @property
    def middle(self) -> str:
        """The paper's middle layer, of which L / 2 blocks are below."""
        stream = [layer for layer in self.layers if not layer.endswith("final_norm")] or self.layers
        return stream[len(stream) // 2]

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

    @cached_property
    def over_types(self) -> dict[str, Series]:
        """What `regressions` finds over the token types of the last checkpoint, at all layers, with
        what the choice of types does to it.
        """
        if self.known_types is None:
            return {}
        table = self.known_types.table
        table = table[table["n"].between(*REGRESSION_COUNT_RANGE)]
        layers = [layer for layer in self.layers if layer in set(table["layer"])]
        if not layers:
            return {}
        columns = [name for name in ("n", "Q", "M", "V", "num_tokens") if name in table]
        wide = table.pivot(index="layer", columns="token_id", values=columns).dropna(axis=1)
        values = {
            name: torch.tensor(wide.loc[layers, name].to_numpy(dtype=float)) for name in columns
        }
        whole = regressions(values)
        count = values["n"].shape[-1]
        drawn = np.random.default_rng(0).integers(count, size=(_DRAWS, count))
        samples = [
            regressions({name: each[:, places] for name, each in values.items()})
            for places in drawn
        ]
        found = {}
        for name, value in whole.items():
            draws = torch.stack([sample[name] for sample in samples], -1)
            deviations = (draws - draws.mean(-1, keepdim=True)) / sqrt(_DRAWS - 1)
            found[name] = Series(layers, value.numpy(), deviations.numpy())
        return found

    def num_types(self) -> float:
        """Token types in the regressions of the last checkpoint."""
        if "token_types_regressed" not in self.run.values:
            return nan
        return float(self.run.table("token_types_regressed").iloc[-1].max())

    def profile(self, metric: str) -> Series:
        """A metric at the layers of the last step where it has a value."""
        of_types = self.over_types.get(metric)
        if metric not in self.run.values:
            return of_types or Series([], np.empty(0), np.empty((0, 1)))
        values = self.run.table(metric)[self.layers].iloc[-1].dropna()
        errors = self._errors(metric)[0].iloc[-1][values.index]
        places = [(self.run.steps[-1], layer) for layer in values.index]
        found = self._series(metric, values, errors, self._deviations(metric, places))
        if of_types is None or [*of_types.names] != found.names:
            return found
        parts = [of_types.deviations]
        if np.isfinite(found.deviations).all():
            parts.append(found.deviations)
        return found._replace(deviations=np.hstack(parts))

    def course(self, metric: str, layer: str = "") -> tuple[Series, list[int]]:
        """A metric over the steps where it has a value, at a layer or as the mean over blocks."""
        table = self.run.table(metric)
        errors, of_means = self._errors(metric)
        if layer:
            values, widths = table[layer].dropna(), errors[layer]
        else:
            values, widths = self.run.means(table).iloc[:, 0].dropna(), of_means.iloc[:, 0]
        steps = [int(step) for step in values.index]
        layers = [layer] if layer else next(iter(self.run.blocks.values()))
        found = self._deviations(metric, [(step, each) for step in steps for each in layers])
        if found is not None:
            of_layers = found.reshape(len(steps), len(layers), -1)
            found = np.asarray(of_layers.mean(axis=1), dtype=np.float64)
        named = values.set_axis([f"step {step:,}" for step in steps])
        return self._series(metric, named, widths.loc[steps], found), steps

    def _series(
        self,
        metric: str,
        values: "pd.Series[float]",
        errors: "pd.Series[float]",
        deviations: NDArray[np.float64] | None,
    ) -> Series:
        if deviations is None:
            deviations = np.diag(errors.to_numpy(dtype=float))
        names = [str(name) for name in values.index]
        found = np.asarray(values, dtype=np.float64)
        return Series(names, found, deviations, self._degrees(metric))

    def _errors(self, metric: str) -> tuple[pd.DataFrame, pd.DataFrame]:
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

    def _deviations(
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
        return found if np.isfinite(found).all() and found.shape[1] > 1 else None

    def _degrees(self, metric: str) -> float:
        """Degrees of freedom of the standard errors of a metric: the groups or batches that they
        are from, less one.
        """
        if self.settings.jackknife:
            of_groups = self._groups.get(metric, pd.DataFrame()).fillna(0.0)
            return max(1, (int(of_groups.ne(0).any().sum()) or self.settings.jackknife) - 1)
        return max(1, self._batches(metric) - 1) if self._has_spread(metric) else inf

    def _batches(self, metric: str) -> float:
        of_dimension = term(metric).spread == "intrinsic_dimension_std"
        return (
            self.settings.id_batches
            if of_dimension
            else self.run.num_rows // self.settings.anisotropy_batch
        )


def regressions(types: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Numbers over token types at each layer, shape (layers, types): those of `type_regressions`,
    and the slopes of Q, M and V as they are, in shares of their means: on log10 n
    (``Q_raw_slope``), and on the number of tokens of words (``Q_size_slope``).
    """
    found = type_regressions({key: types[key] for key in "nQMV"})
    del found["token_types_regressed"]
    abscissae = {"raw": types["n"].log10()}
    if "num_tokens" in types:
        abscissae["size"] = types["num_tokens"]
    for name, x in abscissae.items():
        for key in "QMV":
            slope, _ = least_squares(x, types[key])
            found[f"{key}_{name}_slope"] = slope / types[key].mean(-1)
    return found


def judge(claim: Claim, measured: Measured, others: Sequence[Measured]) -> Verdict:
    """Verdict on a claim about one model; ``others`` are all that were measured with it."""
    if claim.rule == "fact":
        return _fact(claim, measured)
    is_count = claim.metric in _COUNTS
    unlike = measured.unlike((*_OF_PRINTED, *(("sample", "seq_len") if is_count else ())))
    reason = measured.unlike_rows(claim.rows)
    if claim.rule == "value" and not (claim.rows and reason):
        reason = unlike
    if is_count:
        return Verdict(OPEN, reason) if reason else _count(claim, measured)
    if not measured.layers:
        reason = "an encoder and its decoder: the paper has models of one side"
    over_steps = claim.over == "steps" or claim.rule in ("phase", "settles")
    if not reason and over_steps and not measured.run.has_steps:
        reason = "a final model has no steps"
    is_known = claim.token or claim.metric in measured.run.values
    if not reason and not is_known and claim.metric not in measured.over_types:
        reason = f"{claim.metric} was not measured"
    if reason:
        return Verdict(OPEN, reason)
    if claim.token:
        found = _token(claim, measured)
    elif over_steps:
        found = _over_steps(claim, measured)
    else:
        found = _over_layers(claim, measured, others)
    least = claim.least_types or (LEAST_TYPES if claim.metric in measured.over_types else 0)
    if not claim.token and least and not measured.num_types() >= least:
        why = f"{number(measured.num_types())} token types in the range, and {least} are needed"
        found = found._replace(verdict=FEW, why=why)
    elif measured.run.num_rows < claim.least_rows:
        why = f"too few rows: {measured.run.num_rows:,.0f}, and {claim.least_rows:,} are needed"
        found = found._replace(verdict=OPEN, why=why)
    return found._replace(why=f"{found.why}; {unlike}") if unlike else found


def _fact(claim: Claim, measured: Measured) -> Verdict:
    """Verdict on what is known of a model without any text."""
    run = measured.run
    numbers = {
        "layers": float(len(measured.layers)),
        "width": float(run.widths.max()),
        "parameters": float(run.facts.get("num_parameters") or nan),
    }
    return near(numbers[claim.metric], 0.0, claim.number, claim.tolerance, inf)


def _count(claim: Claim, measured: Measured) -> Verdict:
    """Verdict on the number of texts, of token types, or of their occurrences."""
    text = measured.text
    if "num_types" not in text:
        return Verdict(OPEN, "the sweep has not counted them: it is one of an earlier version")
    if measured.settings.num_tokens - text["num_tokens"] < measured.settings.length:
        most = f"num tokens is {measured.settings.num_tokens:,}"
        return Verdict(OPEN, f"other rows: the sample may go on where they end, for {most}")
    lengths = text_lengths(measured.run) or {measured.settings.length: text["num_sequences"]}
    types = float(text["num_types"])
    if "token_types" in measured.run.values:  # with special tokens, where these are rows
        types = float(measured.run.table("token_types").iloc[-1].max())
    counted = {
        "texts": (text["num_sequences"], text["num_sequences"]),
        "occurrences": (
            text["num_tokens"],
            sum(count * length**2 for length, count in lengths.items()),
        ),
        "types": (types, text["num_types_once"]),
    }
    value, variance = map(float, counted[claim.metric])
    where = f"{text['num_sequences']:,} texts"
    found = near(value, sqrt(2 * variance), claim.number, claim.tolerance, inf)
    if text["num_tokens"] < claim.least_rows:
        why = f"too few rows: {text['num_tokens']:,}, and {claim.least_rows:,} are needed"
        found = found._replace(verdict=OPEN, why=why)
    return found._replace(where=where)


def _token(claim: Claim, measured: Measured) -> Verdict:
    """Verdict on a value of one token type."""
    layer = measured.middle if claim.layer == "middle" else claim.layer
    types = measured.types(layer)
    found = types[types["token"].astype(str).str.strip() == claim.token]
    if found.empty:
        return Verdict(
            OPEN,
            f"the token {claim.token!r} does not occur, or token types were not kept",
            where=layer,
        )
    row = found.sort_values("n").iloc[-1]
    where = f"{layer}, n = {row['n']:,.0f}"
    judged = near(float(row[claim.metric]), 0.0, claim.number, claim.tolerance, inf)
    if row["n"] < claim.least_rows:
        why = f"not enough tokens: {row['n']:,.0f} occurrences, and {claim.least_rows} are needed"
        judged = judged._replace(verdict=OPEN, why=why)
    return judged._replace(error=nan, error_of_difference=nan, where=where)


def _over_layers(claim: Claim, measured: Measured, others: Sequence[Measured]) -> Verdict:
    """Verdict on a metric at the layers of the last step."""
    of = measured.profile(claim.metric)
    if claim.rule in ("trend", "peak"):
        last = measured.layers[-1:] if claim.layer == "all but the last" else []
        of = of.only([i for i, name in enumerate(of.names) if name not in last])
        rule = trend if claim.rule == "trend" else partial(peak, in_the_middle=True)
        found = rule(of) if claim.direction == "up" else falling(rule, of)
        return found._replace(where=f"{len(of.names)} layers")
    places = _places(claim.layer, of, measured)
    if not places:
        return Verdict(OPEN, "it has no value here", where=claim.layer)
    weights = places[0]
    where = of.names[next(iter(weights))] if len(weights) == 1 else claim.layer
    value, error = of.weighted(weights)
    if claim.rule == "unchecked":
        random = measured.baseline(claim.metric, where)
        rows = f". Gaussian rows, independent of their tokens: {number(random)}"
        why = f"{claim.why}{rows if isfinite(random) else ''}"
        return Verdict(OPEN, why, value, error, where=where)
    if claim.rule == "value":
        return near(value, error, claim.number, claim.tolerance, of.degrees)._replace(where=where)
    if claim.rule == "order":
        return _order(claim, measured, others)._replace(where=where)
    sign = 1.0 if claim.rule == "above" else -1.0
    contrasts = [
        Contrast(
            f"the difference from {number(claim.limit)} at {_named(each, of, claim)}",
            {place: sign * weight for place, weight in each.items()},
            claim.least,
            -sign * claim.limit,
        )
        for each in places
    ]
    found = decide(of, contrasts, len(places))
    value = sign * found.difference + claim.limit
    difference, error = sign * found.difference, found.error_of_difference
    return found._replace(measured=value, error=error, difference=difference, where=where)


def _order(claim: Claim, measured: Measured, others: Sequence[Measured]) -> Verdict:
    """Verdict on a value that is above or below the mean of another group, or so many times it."""
    of = measured.profile(claim.metric)
    value, error = of.weighted(_places(claim.layer, of, measured)[0])
    rest = []
    for each in others:
        if each is not measured and each.group == claim.than:
            series = each.profile(claim.metric)
            rest += [series.weighted(place) for place in _places(claim.layer, series, each)]
    if not rest:
        return Verdict(OPEN, f"no {claim.than} was measured beside it", value, error)
    # noise alone makes a span, of each of the others too: their mean may err as one of them
    mean, error_of_mean = (float(np.mean(each)) for each in zip(*rest, strict=True))
    sign = 1.0 if claim.direction == "up" else -1.0
    pair = Series(
        [measured.model, f"the mean of {len(rest)} others, {number(mean)}"],
        np.array([value, mean]),
        np.diag([error, error_of_mean]),
        of.degrees,
    )
    times = claim.times
    what = f"its value less {f'{times:g} times ' if times != 1 else ''}{pair.names[1]}"
    choices = len(of.names) * (len(of.names) - 1) // 2 if claim.layer == "span" else 1
    least = VISIBLE * abs(mean) if times == 1 else 0.0
    found = decide(pair, [Contrast(what, {0: sign, 1: -sign * times}, least)], choices)
    return found._replace(difference=sign * found.difference)


def _places(layer: str, of: Series, measured: Measured) -> list[dict[int, float]]:
    """The layers that a claim is about, as weights of the values that they have; several where it
    is about each of them.
    """
    if not of.names:
        return []
    indices = range(len(of.names))
    above = [i for i in indices if not is_input(of.names[i])]
    deeper = [i for i in indices if i >= len(of.names) // 2]
    low, high = int(np.argmin(of.values)), int(np.argmax(of.values))
    names = {"middle": measured.middle, "last": measured.layers[-1]}
    known: dict[str, list[dict[int, float]]] = {
        "all": [{i: 1.0} for i in above],
        "deeper": [{i: 1 / len(deeper) for i in deeper}],
        "min": [{low: 1.0}],
        "max": [{high: 1.0}],
        "span": [{high: 1.0, low: -1.0}],
    }
    own = [{i: 1.0} for i in indices if of.names[i] == names.get(layer, layer)]
    return known.get(layer, own)


def _named(weights: Mapping[int, float], of: Series, claim: Claim) -> str:
    return of.names[next(iter(weights))] if len(weights) == 1 else f"the {claim.layer} layers"


def _over_steps(claim: Claim, measured: Measured) -> Verdict:
    """Verdict on a metric over the steps, at the last layer or as the mean over blocks."""
    layer = measured.layers[-1] if claim.rule == "phase" else ""
    of, steps = measured.course(claim.metric, layer)
    rules: dict[str, Callable[[Series], Verdict]] = {
        "phase": partial(phase, which=claim.phase),
        "settles": partial(settles, steps=steps),
        "peak": peak,
    }
    rule = rules[claim.rule]
    grows = "down" if claim.start == "up" else claim.direction
    found = falling(rule, of) if grows == "down" else rule(of)
    where = layer or "mean over blocks"
    where += f", steps {steps[0]:,} to {steps[-1]:,}" if steps else ""
    return found._replace(where=where)


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
        if not claim.metric:
            is_drawn = not claim.shown or shown(claim, drawn)
            why = claim.why if is_drawn else "it is of what was not measured"
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
    asked = preset(name)
    text = folder.manifest().get("text", {})
    order = [model.rstrip("/") for model in settings.models]
    measured = []
    for run in read_folder(folder.path):
        if run.values.empty:
            continue
        full_name = str(run.checkpoints["model"].iloc[-1])
        model = full_name.rstrip("/")
        kind = run.facts.get("model_class", "")
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
    printed = [row.claim.printed or nan for row in found]
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
    counts = {verdict: sum(row.found.verdict == verdict for row in found) for verdict in _KINDS}
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
    decided = [row for row in found if row.found.verdict in (HOLDS, FAILS)]
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
