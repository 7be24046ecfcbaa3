"""What a paper prints, beside what a sweep with its preset has measured.

    python -m research.reproduce yamagiwa2025 --model openai-community/gpt2 --num-tokens 400000

Options of ``embedgeo sweep`` after the name of the paper take the place of its preset's. Then
``reproduce/<paper>.html`` and ``.csv`` in the folder of the sweep have a row for each claim about
each model: the printed and the measured value, their difference, and a verdict. Below them are
figures of the report in ``reproduce/<paper>/`` and of token types.
"""

import json
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from math import inf, isfinite, nan, sqrt
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import jinja2
import numpy as np
import pandas as pd

from research import token_types
from research.claims import LEAST_TYPES, RULES, VISIBLE, Claim, Paper, read_claims
from research.measured import Measured, preset, read_measured
from research.verdicts import (
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
    number,
    peak,
    phase,
    settles,
    trend,
)

PAPERS = ("yamagiwa2025", "razzhigaev2024", "li2025")
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
MADE = "made by a few rows"
# as the page calls them
_KINDS = {HOLDS: "holds", FAILS: "fails", MADE: "open", FEW: "open", OPEN: "open"}
# of all models, in the report
_TOGETHER = {"profile": "compared-profiles", "dynamics": "compared-dynamics"}


def judge(claim: Claim, measured: Measured, others: Sequence[Measured]) -> Verdict:
    """Verdict on a claim about one model; ``others`` are all that were measured with it.

    A verdict that turns without massive rows neither holds nor fails: they make it.
    """
    found = _judge(claim, measured, others)
    num_massive = measured.num_massive(claim.metric)
    if claim.token or not num_massive or found.verdict not in (HOLDS, FAILS):
        return found
    ordinary = {id(each): each.without_massive(claim.metric) for each in [measured, *others]}
    without = _judge(claim, ordinary[id(measured)], [ordinary[id(each)] for each in others])
    if without.verdict in (found.verdict, FEW):
        return found
    why = (
        f"made by {num_massive:,.0f} rows: it {found.verdict} with them; without these massive "
        f"rows the value is {number(without.measured)}, and the verdict: {without.verdict}"
    )
    return found._replace(verdict=MADE, why=why)


def _judge(claim: Claim, measured: Measured, others: Sequence[Measured]) -> Verdict:
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
    if not reason and over_steps and not measured.has_steps:
        reason = "a final model has no steps"
    is_known = claim.token or claim.metric in measured.metrics
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
    elif measured.num_rows < claim.least_rows:
        why = f"too few rows: {measured.num_rows:,.0f}, and {claim.least_rows:,} are needed"
        found = found._replace(verdict=OPEN, why=why)
    return found._replace(why=f"{found.why}; {unlike}") if unlike else found


def _fact(claim: Claim, measured: Measured) -> Verdict:
    """Verdict on what is known of a model without any text."""
    if claim.metric == "architecture":
        kind = measured.architecture
        verdict = (HOLDS if kind == claim.printed else FAILS) if kind else OPEN
        return Verdict(verdict, f"models of this class are {kind or 'unknown'}")
    numbers = {
        "layers": float(len(measured.layers)),
        "width": float(measured.records["width"].max()),
        "parameters": float(measured.facts.get("num_parameters") or nan),
    }
    return near(numbers[claim.metric], 0.0, claim.number, claim.tolerance, inf)


def _count(claim: Claim, measured: Measured) -> Verdict:
    """Verdict on the number of texts, of token types, or of their occurrences."""
    text = measured.text
    if measured.asked["num_tokens"] - text["num_tokens"] < measured.length:
        most = f"num tokens is {measured.asked['num_tokens']:,}"
        return Verdict(OPEN, f"other rows: the sample may go on where they end, for {most}")
    written: dict[str, int] = json.loads(measured.facts.get("text_lengths", "{}"))
    lengths = {int(length): count for length, count in written.items()}
    lengths = lengths or {measured.length: text["num_sequences"]}
    types = float(text["num_types"])
    if "token_types" in measured.metrics:  # with special tokens, where these are rows
        types = float(measured.table("token_types").iloc[-1].max())
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
    types = measured.types[measured.types["layer"] == layer]
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
    if len(places) > 1:
        where = found.where or where  # the layer whose value it is
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
    above = [i for i in indices if not _is_input(of.names[i])]
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


def _is_input(layer: str) -> bool:
    """Tell the layer that enters the first block from others."""
    return layer.endswith("embed") or layer.endswith("hidden.00")


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
    names = _names(measured)
    for claim in paper.claims:
        if not claim.metric:
            is_drawn = not claim.shown or shown(claim, drawn)
            why = claim.why if is_drawn else "it is of what was not measured"
            found.append(Row(claim, "", Verdict(OPEN, why)))
            continue
        about = [
            (name, each)
            for name, each in zip(names, measured, strict=True)
            if (not claim.models or each.model in claim.models)
            and (not claim.group or each.group == claim.group)
        ]
        found += [Row(claim, name, judge(claim, each, measured)) for name, each in about]
        if not about:
            what = (
                ", ".join(claim.models)
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


def write_page(paper: Paper, folder: Path) -> list[Row]:
    """Write the page and its table into the folder of a sweep, and the figures below its rows."""
    page = folder / "reproduce" / f"{paper.name}.html"
    report = page.with_suffix("")
    measured = read_measured(folder, paper, report / "metrics.csv")
    run_command("report", str(folder), "--out", str(report)).check_returncode()
    names = _names(measured)
    for name, each in zip(names, measured, strict=True):
        prefix = f"{quote(name, safe='')}-" if len(measured) > 1 else ""
        token_types.save_figures(each, report / "token-types", prefix, paper.layers)
    pictures = {path.stem: path for path in sorted(report.glob("*/*.png"))}
    found = rows(paper, measured, [*pictures])
    as_table(found).to_csv(page.with_suffix(".csv"), index=False)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    claims = []
    for claim, of_claim in groupby(found, key=attrgetter("claim")):
        paths = {
            name: pictures[name].relative_to(page.parent).as_posix()
            for name in shown(claim, [*pictures])
        }
        claims.append((claim, [(row, _cells(row)) for row in of_claim], paths))
    text = environment.get_template("reproduce.html.jinja").render(
        paper=paper,
        counts=_counts(found),
        claims=[each for each in claims if any(row.model for row, _ in each[1])],
        others=[each for each in claims if not any(row.model for row, _ in each[1])],
        kinds=_KINDS,
        rules=[RULES[rule] for rule in dict.fromkeys(row.claim.rule for row in found)],
        report=f"{paper.name}/index.html",
    )
    page.write_text(text, encoding="utf-8", errors="replace")
    return found


def _names(measured: Sequence[Measured]) -> list[str]:
    """The names of the models; their labels where several have one name."""
    models = [each.model for each in measured]
    return [each.model if models.count(each.model) == 1 else each.label for each in measured]


def _counts(found: Sequence[Row]) -> dict[str, int]:
    return {verdict: sum(row.found.verdict == verdict for row in found) for verdict in _KINDS}


def _cells(row: Row) -> dict[str, str]:
    """The numbers of a row as text."""

    def cell(value: float, error: float) -> str:
        if not isfinite(value):
            return "–"
        text = f"{number(value)} ± {error:.2g}" if 0 < error < inf else number(value)
        return text.replace("-", "−")

    found = row.found
    return {
        "paper": row.claim.printed.replace("-", "−") or "–",
        "measured": cell(found.measured, found.error),
        "difference": cell(found.difference, found.error_of_difference),
    }


def run_command(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command of embedgeo."""
    return subprocess.run([sys.executable, "-m", "embedgeo.cli", *arguments], check=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser("python -m research.reproduce", allow_abbrev=False)
    parser.add_argument("paper", choices=PAPERS)
    parser.add_argument("--claims", type=Path, help="a YAML file in the form of papers.yaml")
    parser.add_argument("--out", type=Path, help="the folder; default: the preset's")
    options, of_sweep = parser.parse_known_args(arguments)
    paper = read_claims(options.paper, options.claims)
    folder = options.out or Path(preset(paper.name)["out"])
    named = ["--preset", paper.name, *of_sweep, "--out", str(folder)]
    status = run_command("sweep", *named).returncode
    if "--dry-run" in of_sweep or not any(folder.glob("checkpoints/[!.]*.parquet")):
        return status
    found = write_page(paper, folder)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in _counts(found).items())
    print(f"{folder / 'reproduce' / paper.name}.html: {counts}")
    return status


if __name__ == "__main__":
    sys.exit(main())
