"""The tables and figures of docs/findings.md, of small models that are trained here.

    python -m research.findings [--size full|small] [--processes 2]

Does the runs of `research.findings_runs` that have not been done, and writes their tables: into
the page those that it has marks for, as CSV files in docs/findings/ the others; and the figures
beside the page. The sentences of the page are not touched. The small size, which is for tests,
writes a copy of all beside its runs.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from math import ceil, hypot, inf, isfinite, nan, sqrt
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from jsonargparse import CLI
from matplotlib import rc_context
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from scipy import stats

from docs.dark import save
from examples.alarm import HEADLINES, Alarm, Departure
from research.findings_runs import (
    COUNT_RANGES,
    EVENTS,
    KINDS,
    PROCESSED,
    SIZES,
    STARTS,
    Size,
    do_runs,
    read_runs,
    shared_among,
)

PAGE = Path("docs/findings.md")
IMAGES = "images"
"""Folder of the figures, beside the page."""

NUMBERS = (
    "V_W_over_V",
    "V_W_over_V_unbiased",
    "M_over_Q",
    "mean_cosine",
    "anisotropy",
    "effective_rank",
    "intrinsic_dimension",
    "intrinsic_dimension_between",
    "intrinsic_dimension_within",
    "V_on_M_slope",
    "V_on_M_r2",
)
DRAWN = {
    "V_W_over_V_unbiased": "V_W / V (unbiased)",
    "M_over_Q": "M / Q",
    "anisotropy": "anisotropy",
    "intrinsic_dimension_between": "dimension between tokens",
}
"""The title of each number that is drawn."""
LOOK = {
    "font.size": 9.5,
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "text.parse_math": False,
}
VISIBLE = 0.1
"""Share of the ends by which a peak has to exceed them: less is nothing that a reader of a figure
would see.
"""

LEAST_TAU = 0.5
"""Kendall's correlation with the depth that is a trend."""

SETTLED = 0.8
"""Share of its rise that a number which has stabilised keeps."""

TRUST = 0.95
COLOURS = dict(zip(KINDS, ("#0072b2", "#d55e00", "#009e73"), strict=True))
NAMES = {"decoder": "decoder", "pre-LN": "encoder, pre-LN", "post-LN": "encoder, post-LN"}

Array = NDArray[np.float64]
Frame = pd.DataFrame


# ── values of runs


def chosen(values: Frame, kind: str, variant: str) -> Frame:
    """Values of the sound runs of a kind, measured in a way."""
    return values[(values["kind"] == kind) & ~values["is_alarm"] & (values["variant"] == variant)]


def is_block(frame: Frame) -> Any:
    """The records of blocks."""
    return frame["layer"].str.startswith("block.")


def through_blocks(frame: Frame, metric: str, *, with_input: bool = False) -> Frame:
    """Values by seed and block, which the input may stand before."""
    is_one = is_block(frame) | (frame["layer"] == "embed") if with_input else is_block(frame)
    found = frame[is_one & (frame["metric"] == metric)]
    return found.pivot(index="seed", columns="layer_index", values="value").set_axis(
        found.drop_duplicates("layer_index").sort_values("layer_index")["layer"], axis=1
    )


def over_steps(frame: Frame, metric: str) -> Frame:
    """Means over blocks by step, a column a seed; of the last rows there is one layer."""
    found = frame[
        (is_block(frame) | (frame["variant"] == "last rows")) & (frame["metric"] == metric)
    ]
    return found.pivot_table(index="step", columns="seed", values="value", aggfunc="mean")


def middle(frame: Frame) -> str:
    """The last block of the lower half: L / 2 blocks are passed, as at the papers' middle layer."""
    blocks = sorted(frame.loc[is_block(frame), "layer"].unique())
    return str(blocks[len(blocks) // 2 - 1])


def at_block(frame: Frame, metric: str, block: str) -> Array:
    """Values at a block, one a seed."""
    found = frame[(frame["layer"] == block) & (frame["metric"] == metric)]
    return found.sort_values("seed")["value"].to_numpy(dtype=float)


def mean_and_error(of_seeds: Array) -> tuple[float, float]:
    """Mean over seeds and its standard error."""
    of_seeds = of_seeds[np.isfinite(of_seeds)]
    if len(of_seeds) < 2:
        return float(of_seeds.mean()) if len(of_seeds) else nan, nan
    return float(of_seeds.mean()), float(of_seeds.std(ddof=1) / sqrt(len(of_seeds)))


def shown(value: float, error: float = nan) -> str:
    """A value with two digits of its error; a dash where there is none."""
    if not isfinite(value):
        return "–"
    text = f"{value:.3g}"
    if isfinite(error) and error > 1e-12 * abs(value):
        digits = 1 - int(f"{error:.1e}".partition("e")[2])
        parts = (f"{round(each, digits):,.{max(0, digits)}f}" for each in (value, error))
        text = " ± ".join(parts)
    return text.replace("-", "−")


# ── claims


def peak(curve: Array) -> float:
    """Share by which the largest value between the ends exceeds the larger end."""
    curve = curve[np.isfinite(curve)]
    end = max(curve[0], curve[-1])
    return float((curve[1:-1].max() - end) / abs(end))


def bell(curve: Array) -> float:
    """The peak in the middle half; where a value outside of it is larger, the share, below 0, that
    is lacking.
    """
    last = len(curve) - 1
    inside = curve[ceil(last / 4) : last * 3 // 4 + 1].max()
    highest = curve.max()
    end = max(curve[0], curve[-1])
    return float(inside / end - 1 if inside == highest else inside / highest - 1)


def span(curve: Array) -> float:
    """The largest value less the smallest."""
    return float(np.nanmax(curve) - np.nanmin(curve))


def fall(curve: Array) -> float:
    """Share of the first value by which the lowest one is below it."""
    return float(1 - np.nanmin(curve) / curve[0])


def rise(curve: Array) -> float:
    """Share of the lowest value by which the highest one after it exceeds it."""
    low = int(np.nanargmin(curve))
    return float(np.nanmax(curve[low:]) / curve[low] - 1)


def second_fall(curve: Array) -> float:
    """Share of the highest value after the lowest one by which the last is below it."""
    return float(1 - curve[-1] / np.nanmax(curve[int(np.nanargmin(curve)) :]))


def kept(curve: Array) -> float:
    """Share of its largest rise that a curve over steps in half octaves has kept at the end and
    throughout the second half of the training; 0 where the rise is too small to see.
    """
    largest = float(np.nanmax(curve)) - curve[0]
    if largest < VISIBLE * abs(curve[0]):
        return 0.0
    return float((np.nanmin(curve[-3:]) - curve[0]) / largest)


def tau(curve: Array) -> float:
    """Kendall's correlation of a number with the depth."""
    return float(stats.kendalltau(np.arange(len(curve)), curve).statistic)


class Claim(NamedTuple):
    """A claim as a statistic of each run, which has to be more than a limit."""

    paper: str
    text: str
    metric: str
    statistic: Callable[[Array], float] | None  # of the curve; None: the value at the middle block
    over: Literal["depth", "steps", "middle", "steps of last rows"]
    least: float
    sign: int = 1
    kinds: Sequence[str] = KINDS  # that it is about
    is_beside_decoder: bool = False  # the statistic is the decoder's less the own one

    @property
    def is_on_page(self) -> bool:
        """A paper's, on the end of training; the others are in a file of their own."""
        return bool(self.paper) and self.over in ("depth", "middle")

    def of_runs(self, frame: Frame) -> Array:
        """The statistic of each run."""
        if self.over == "middle":
            return at_block(frame, self.metric, middle(frame))
        is_depth = self.over == "depth"
        table = (
            through_blocks(frame, self.metric, with_input=True)
            if is_depth
            else over_steps(frame, self.metric).T
        )
        assert self.statistic is not None  # of a curve there is one
        return np.array([self.statistic(curve) for curve in table.to_numpy(dtype=float)])

    @property
    def limit(self) -> str:
        """What holds, in words."""
        of = "at the middle block" if self.statistic is None else SHAPES[self.statistic]
        return f"{of} {'<' if self.sign < 0 else '>'} {self.sign * self.least + 0.0:.3g}"

    def verdict(self, of_runs: Array, finest: float = 0.0) -> str:
        """In words: by the interval over seeds, of at least ``finest`` to each side."""
        mean, error = mean_and_error(self.sign * of_runs)
        if not isfinite(error):
            return "open"
        margin = max(finest, float(stats.t.ppf((1 + TRUST) / 2, len(of_runs) - 1)) * error)
        return (
            "holds"
            if mean - margin > self.least
            else "fails"
            if mean + margin < self.least
            else "open"
        )

    def cell(self, values: Frame, kind: str, variant: str) -> str:
        """The statistic of a kind of model measured in a way, and the verdict."""
        if kind not in self.kinds:
            return "–"
        found = self.of_runs(chosen(values, kind, variant))
        if self.is_beside_decoder:
            decoder = chosen(values, "decoder", variant)
            found = (
                self.of_runs(decoder if len(decoder) else chosen(values, "decoder", "tokens"))
                - found
            )
        finest = 0.0
        if self.statistic is tau:  # a pair that is swapped
            count = through_blocks(chosen(values, kind, variant), self.metric, with_input=True)
            finest = 4 / (count.shape[1] * (count.shape[1] - 1))
        mean, error = mean_and_error(found)
        seeds = " in all seeds" if error <= 1e-12 * abs(mean) else ""
        return f"{shown(mean, error)}{seeds}: {self.verdict(found, finest)}"


SHAPES = {
    peak: "max(inside) ÷ larger end − 1",
    bell: "max(middle half) ÷ larger end − 1",
    span: "decoder's range − encoder's",
    fall: "1 − lowest ÷ first",
    rise: "highest after the lowest ÷ lowest − 1",
    second_fall: "1 − last ÷ highest after the lowest",
    kept: "share of the rise that is kept",
    tau: "Kendall's τ",
}
"""Statistics in words."""

RAZZHIGAEV, YAMAGIWA, LI = "Razzhigaev", "Yamagiwa", "Li"
ENCODERS = KINDS[1:]
CLAIMS = (
    Claim(
        RAZZHIGAEV,
        "decoder: anisotropy is highest half way",
        "anisotropy",
        bell,
        "depth",
        VISIBLE,
        1,
        KINDS[:1],
    ),
    Claim(
        RAZZHIGAEV,
        "encoder: its anisotropy spans less",
        "anisotropy",
        span,
        "depth",
        0,
        1,
        ENCODERS,
        True,
    ),
    Claim(
        RAZZHIGAEV,
        "decoder: anisotropy grows over training, then stabilises",
        "anisotropy",
        kept,
        "steps",
        SETTLED,
        1,
        KINDS[:1],
    ),
    Claim(YAMAGIWA, "M / Q grows with depth", "M_over_Q", tau, "depth", LEAST_TAU),
    Claim(YAMAGIWA, "V_W / V grows with depth", "V_W_over_V", tau, "depth", LEAST_TAU),
    Claim(
        YAMAGIWA,
        "slope of V on M over types",
        "V_on_M_slope",
        None,
        "middle",
        0.0,
        -1,
    ),
    Claim(YAMAGIWA, "the same: R²", "V_on_M_r2", None, "middle", 0.5),
    Claim(
        "",
        "Q falls with frequency: slope (Yamagiwa & Shimodaira: about 0)",
        "Q_freq_slope",
        None,
        "middle",
        0.0,
        -1,
    ),
    Claim(YAMAGIWA, "M falls with frequency: slope", "M_freq_slope", None, "middle", 0.0, -1),
    Claim(YAMAGIWA, "V grows with frequency: slope", "V_freq_slope", None, "middle", 0.0),
    Claim(
        RAZZHIGAEV,
        "dimension of all rows rises and falls over training",
        "intrinsic_dimension",
        peak,
        "steps",
        VISIBLE,
    ),
    Claim(
        RAZZHIGAEV,
        "dimension between tokens rises and falls over training",
        "intrinsic_dimension_between",
        peak,
        "steps",
        VISIBLE,
    ),
    *(
        Claim(
            LI,
            text,
            "effective_rank_eigenvalues",
            statistic,
            "steps of last rows",
            VISIBLE,
            1,
            KINDS[:1],
        )
        for text, statistic in (
            ("effective rank of the last rows falls at first", fall),
            ("effective rank of the last rows grows after that", rise),
            ("effective rank of the last rows falls once more", second_fall),
        )
    ),
    Claim("", "M / Q rises and falls over training", "M_over_Q", peak, "steps", VISIBLE),
    Claim("", "anisotropy rises and falls over training", "anisotropy", peak, "steps", VISIBLE),
    Claim("", "V_W / V (unbiased) falls at first", "V_W_over_V_unbiased", fall, "steps", VISIBLE),
    Claim("", "V_W / V (unbiased) grows after that", "V_W_over_V_unbiased", rise, "steps", VISIBLE),
)
"""What papers say, and below that what the demo of this package shows."""


# ── tables


def markdown(head: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    """A table. A value stands on a line with its error."""
    lines = (
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    )
    return "\n".join(lines).replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def models(losses: Frame, size: Size) -> str:
    """What was trained, and what it has learned."""
    rows = []
    for kind in KINDS:
        training = size.trainings[kind]
        of_kind = losses[
            (losses["kind"] == kind) & ~losses["is_alarm"] & losses["held_out"].notna()
        ]
        last = of_kind[of_kind["step"] == training.steps]
        found, unigram = last["held_out"].to_numpy(dtype=float), float(last["unigram"].mean())
        shape = (
            f"{training.num_layers} blocks, width {training.width}, {training.seq_len} tokens a "
            "sequence"
        )
        rows.append(
            (
                NAMES[kind],
                shape,
                f"{training.steps:,}",
                shown(*mean_and_error(found)),
                f"{unigram:.2f}",
                f"{unigram - found.max():.2f}",
            )
        )
    head = (
        "",
        "",
        "steps",
        "nats a token, held out",
        "by frequencies",
        "the worst seed is better by",
    )
    return markdown(head, rows)


def claims(values: Frame, chosen: Sequence[Claim]) -> str:
    """Claims with their verdicts."""
    ways = {"steps": "training", "steps of last rows": "last rows"}
    rows = [
        [
            claim.text,
            claim.paper,
            claim.limit,
            *(claim.cell(values, kind, ways.get(claim.over, "tokens")) for kind in KINDS),
        ]
        for claim in chosen
    ]
    return markdown(("claim", "after", "holds if", *(NAMES[kind] for kind in KINDS)), rows)


VARIANTS = ("tokens", "no first token", "no special tokens", "text in a row", "words")


def sampling(values: Frame, kind: str) -> str:
    """The claims about depth and token types under other sampling."""
    variants = [variant for variant in VARIANTS if len(chosen(values, kind, variant))]
    unbiased = Claim(
        "", "V_W / V (unbiased) grows with depth", "V_W_over_V_unbiased", tau, "depth", LEAST_TAU
    )
    about = [claim for claim in CLAIMS if claim.over in ("depth", "middle") and kind in claim.kinds]
    about.insert(3, unbiased)
    rows = [
        [claim.text, *(claim.cell(values, kind, variant) for variant in variants)]
        for claim in about
    ]
    return markdown((NAMES[kind], *variants), rows)


def neighbours(values: Frame) -> str:
    """The dimension by whose neighbours count, at the first, the middle and the last block."""
    rows = []
    for kind in KINDS:
        tokens = chosen(values, kind, "tokens")
        apart, same = (
            chosen(values, kind, "other sequences"),
            chosen(values, kind, "same covariance"),
        )
        blocks = [*through_blocks(tokens, "n")]
        for block in (blocks[0], middle(tokens), blocks[-1]):
            row = [NAMES[kind], f"`{block}`"]
            for frame, metric in (
                (tokens, "intrinsic_dimension"),
                (apart, "intrinsic_dimension"),
                (tokens, "intrinsic_dimension_between"),
                (tokens, "intrinsic_dimension_within"),
                (tokens, "same_type_neighbors"),
                (same, "intrinsic_dimension"),
            ):
                table = through_blocks(frame, metric)
                found = table[block].to_numpy(dtype=float) if block in table else np.array([])
                row.append(shown(*mean_and_error(found)))
            rows.append(row)
    head = (
        "",
        "",
        "all rows",
        "neighbours in other sequences",
        "one row a token",
        "rows of one token",
        "share with a nearest neighbour of their own token",
        "Gaussian rows of the same covariance",
    )
    return markdown(head, rows)


def gaussian(values: Frame, kind: str) -> str:
    """Numbers at the middle block beside those of Gaussian rows with the same token ids."""
    frames = [
        chosen(values, kind, variant) for variant in ("tokens", "isotropic", "same covariance")
    ]
    rows = []
    for metric in (*NUMBERS, "norm_cv"):
        cells = [mean_and_error(at_block(frame, metric, middle(frames[0]))) for frame in frames]
        (value, error), _, (same, error_of_same) = cells
        apart = abs(value - same) / hypot(error, error_of_same)
        far = (
            ""
            if not isfinite(apart)
            else "as these"
            if apart < _limit(frames[0])
            else "more"
            if value > same
            else "less"
        )
        rows.append((f"`{metric}`", *(shown(*cell) for cell in cells), far))
    head = (
        NAMES[kind],
        "measured",
        "isotropic Gaussian rows",
        "Gaussian rows of the same mean and covariance",
        "",
    )
    return markdown(head, rows)


def _limit(frame: Frame) -> float:
    """Standard errors of a difference of means over seeds that are significant."""
    num_seeds = frame["seed"].nunique()
    return float(stats.t.ppf((1 + TRUST) / 2, 2 * num_seeds - 2))


def errors(values: Frame, size: Size, kind: str) -> str:
    """Spreads of each number at the middle block, and the probes that tell two checkpoints
    apart.
    """
    after, before = chosen(values, kind, "after"), chosen(values, kind, "before")
    block = middle(after)
    seeds = chosen(values, kind, "training")
    seeds = seeds[seeds["step"] == size.trainings[kind].steps]  # which read one probe

    def probes(frame: Frame, metric: str, num_tokens: int, column: str = "value") -> Array:
        found = frame[
            (frame["layer"] == block)
            & (frame["metric"] == metric)
            & (frame["num_tokens"] == num_tokens)
        ].sort_values("probe")
        return found[column].to_numpy(dtype=float)

    rows = []
    for metric in NUMBERS:
        of_probes = probes(after, metric, size.probe)
        jackknife = probes(after, metric, size.probe, "stderr")
        jackknife = jackknife[np.isfinite(jackknife)]
        paired = of_probes - probes(before, metric, size.probe)
        smallest = []
        for is_paired in (True, False):
            least = inf
            for num_tokens in sorted(size.probe_sizes, reverse=True):
                one, two = probes(after, metric, num_tokens), probes(before, metric, num_tokens)
                spread = (
                    (one - two).std(ddof=1)
                    if is_paired
                    else hypot(one.std(ddof=1), two.std(ddof=1))
                )
                if not abs((one - two).mean()) > stats.norm.ppf((1 + TRUST) / 2) * spread:
                    break
                least = num_tokens
            smallest.append(f"{least:,}" if isfinite(least) else f"> {max(size.probe_sizes):,}")
        rows.append(
            (
                f"`{metric}`",
                shown(float(np.nanmean(of_probes))),
                shown(float(of_probes.std(ddof=1))),
                shown(float(jackknife.mean()) if len(jackknife) else nan),
                shown(float(at_block(seeds, metric, block).std(ddof=1))),
                shown(float(paired.mean()), float(paired.std(ddof=1))),
                *smallest,
            )
        )
    head = (
        NAMES[kind],
        "value",
        "spread over probes",
        "jackknife",
        "spread over seeds",
        "change since the step before",
        "tokens to see it, one probe",
        "two probes",
    )
    return markdown(head, rows)


def beyond_the_loss(values: Frame, losses: Frame) -> str:
    """Where numbers turn while the held-out loss falls, and what the loss is there."""
    rows = []
    for kind in KINDS:
        frame = chosen(values, kind, "training")
        held_out = losses[
            (losses["kind"] == kind) & ~losses["is_alarm"] & losses["held_out"].notna()
        ]
        held_out = held_out.pivot(index="step", columns="seed", values="held_out")
        for metric, is_low in (
            ("M_over_Q", False),
            ("anisotropy", False),
            ("effective_rank", True),
            ("V_W_over_V_unbiased", True),
            ("intrinsic_dimension_between", True),
        ):
            curves = over_steps(frame, metric)
            places = curves.idxmin() if is_low else curves.idxmax()
            turns = [f"{step:,}" for step in sorted(int(step) for step in places)]
            at = np.array([held_out.at[step, seed] for seed, step in places.items()])
            extreme = (curves.min() if is_low else curves.max()).to_numpy(dtype=float)
            end = curves.iloc[-1].to_numpy(dtype=float)
            rows.append(
                (
                    NAMES[kind],
                    f"`{metric}`: {'lowest' if is_low else 'highest'}",
                    ", ".join(turns),
                    shown(*mean_and_error(extreme)),
                    shown(*mean_and_error(at)),
                    shown(*mean_and_error(end)),
                    shown(*mean_and_error(held_out.iloc[-1].to_numpy(dtype=float))),
                )
            )
    head = (
        "",
        "",
        "at step (each seed)",
        "value there",
        "loss there",
        "value at the end",
        "loss at the end",
    )
    return markdown(head, rows)


def equal_loss(values: Frame, losses: Frame) -> str:
    """Both encoders at one held-out loss: how many standard deviations over seeds their geometry is
    apart.
    """
    kinds = "pre-LN", "post-LN"
    curves = {}
    for kind in kinds:
        of_kind = losses[
            (losses["kind"] == kind) & ~losses["is_alarm"] & losses["held_out"].notna()
        ]
        curves[kind] = of_kind.pivot(index="step", columns="seed", values="held_out")
    level = max(float(curve.iloc[-1].max()) for curve in curves.values()) + 0.01
    rows = []
    for metric in NUMBERS:
        found = {}
        for kind in kinds:
            table = over_steps(chosen(values, kind, "training"), metric)
            of_seeds = []
            for seed in table:
                loss = curves[kind][seed].reindex(table.index)
                last = int(np.argmax(loss.to_numpy() <= level))
                pair = slice(max(0, last - 1), last + 1)
                of_seeds.append(np.interp(-level, -loss.iloc[pair], table[seed].iloc[pair]))
            found[kind] = np.array(of_seeds, dtype=float)
        means = [mean_and_error(each) for each in found.values()]
        spread = sqrt(sum(float(each.var(ddof=1)) for each in found.values()) / 2)
        apart = (means[0][0] - means[1][0]) / spread if spread else nan
        rows.append((f"`{metric}`", *(shown(*each) for each in means), shown(apart)))
    head = (
        f"at {level:.2f} nats held out",
        *(NAMES[kind] for kind in kinds),
        "apart, in spreads over seeds",
    )
    return markdown(head, rows)


def of_final_loss(values: Frame, losses: Frame) -> str:
    """Correlation, over the sound runs of the small decoder, of a number on the way with the loss
    at the end.
    """
    sound = values[values["is_alarm"] & (values["fault"] == "")]
    held_out = losses[losses["is_alarm"] & (losses["fault"] == "") & losses["held_out"].notna()]
    held_out = held_out.pivot(index="step", columns="seed", values="held_out")
    end = held_out.iloc[-1]
    steps = [held_out.index[len(held_out) * part // 4] for part in (1, 2)] + [held_out.index[-1]]
    rows = []
    curves = {metric: over_steps(sound, metric) for metric in HEADLINES} | {"loss": held_out}
    for name, curve in curves.items():
        cells = []
        for step in steps:
            found = curve.loc[step, end.index].to_numpy(dtype=float)
            r = float(np.corrcoef(found, end)[0, 1])
            if len(end) < 4 or abs(r) > 1 - 1e-9:
                cells.append(shown(r))
                continue
            margin = stats.norm.ppf((1 + TRUST) / 2) / sqrt(len(end) - 3)
            low, high = (float(np.tanh(np.arctanh(r) + each)) for each in (-margin, margin))
            cells.append(f"{r:.2f} ({low:.2f} to {high:.2f})".replace("-", "−"))
        rows.append((f"`{name}`", *cells))
    return markdown(
        ("correlation with the last loss", *(f"at step {step:,}" for step in steps)), rows
    )


# ── alarms


PLACES = ["step", "layer", "metric", "value"]


class Replay(NamedTuple):
    """Alarms of a run: of its geometry, of the training loss at every step, of the held-out loss
    when measured.
    """

    geometry: list[Departure]
    training: list[Departure]
    held_out: list[Departure]


def raised(layers: str, values: Frame) -> list[Departure]:
    """All alarms of a run, from a value a row, with its step, layer and metric."""
    alarm = Alarm(lambda text: None, values["metric"].unique(), layers)
    for step, of_step in values.groupby("step"):
        alarm(int(str(step)), of_step.to_dict("records"))
    return alarm.departures


def replayed(values: Frame, losses: Frame) -> Replay:
    """The alarms of a run."""
    kept = values.loc[values["metric"].isin(HEADLINES) & is_block(values), PLACES]
    means = kept.groupby(["step", "metric"], sort=False, as_index=False)["value"].agg(
        lambda of_blocks: of_blocks.to_numpy().mean()
    )
    geometry = pd.concat([kept, means.assign(layer="mean")])

    def of_loss(column: str) -> list[Departure]:
        found = losses.loc[losses[column].notna(), ["step", column]]
        return raised(
            "model", found.rename(columns={column: "value"}).assign(metric="loss", layer="model")
        )

    return Replay(raised(r"block\.\d+|mean", geometry), of_loss("loss"), of_loss("held_out"))


Replays = dict[tuple[str, int], Replay]
"""By fault and seed."""


def all_replays(values: Frame, losses: Frame, processes: int) -> Replays:
    """The alarms of the sound runs, and of those with a fault that begins in the middle."""
    kept = values[
        values["is_alarm"] & values["metric"].isin(HEADLINES) & ~values["fault"].isin(STARTS)
    ]
    of_runs = {
        (str(fault), int(seed)): of_run for (fault, seed), of_run in kept.groupby(["fault", "seed"])
    }
    own = [
        losses[losses["is_alarm"] & (losses["fault"] == fault) & (losses["seed"] == seed)]
        for fault, seed in of_runs
    ]
    replays = shared_among(processes, replayed, of_runs.values(), own)
    return dict(zip(of_runs, replays, strict=True))


def alarms(replays: Replays, onset: int) -> str:
    """What is found of faults that begin in the middle, when, and by what first; and alarms without
    a fault.
    """
    rows = []
    for fault in (*EVENTS, ""):
        runs = [replay for (name, _), replay in replays.items() if name == fault]
        start = onset if fault else 0
        row = [fault or "none"]
        for way in Replay._fields:
            firsts = [
                next((each for each in getattr(run, way) if each.step >= start), None)
                for run in runs
            ]
            found = [each for each in firsts if each is not None]
            cell = f"{len(found)} of {len(runs)}"
            if fault and found:
                later = round(np.median([each.step - start for each in found]))
                cell += f", {later} step{'s' * (later != 1)}"
            row.append(cell)
        firsts = [next((each for each in run.geometry if each.step >= start), None) for run in runs]
        keys = [f"`{each.metric}`" for each in firsts if each is not None]
        row.append(", ".join(f"{key} ({keys.count(key)})" for key in dict.fromkeys(keys)))
        rows.append(row)
    # whose runs are one run until a fault begins
    seeds = {seed for fault, seed in replays if fault}
    row = ["before the fault"]
    for way in Replay._fields:
        early = {
            seed
            for (fault, seed), run in replays.items()
            for alarm in getattr(run, way)
            if fault and alarm.step < onset
        }
        row.append(f"{len(early)} of {len(seeds)}")
    rows.append([*row, ""])
    head = (
        "fault",
        "geometry",
        "training loss at every step",
        "held-out loss as often as the geometry",
        "first key",
    )
    return markdown(head, rows)


def from_the_start(values: Frame, losses: Frame) -> str:
    """Runs that are wrong from the first step, beside the sound ones: when they leave what seeds
    alone give.
    """
    of_alarms = values[values["is_alarm"] & values["metric"].isin(HEADLINES) & is_block(values)]
    geometry = of_alarms.pivot_table(
        index=["fault", "seed", "step"], columns=["metric", "layer"], values="value"
    )
    of_losses = losses[losses["is_alarm"] & losses["held_out"].notna()]
    loss = of_losses.pivot_table(index=["fault", "seed", "step"], values="held_out")
    last = int(geometry.loc[STARTS[0]].index.get_level_values("step").max())

    def leaves(table: Frame, fault: str, seed: int, *, is_last: bool) -> tuple[float, str]:
        """Step at which a run leaves the sound ones, itself left out, at two measurements in a row;
        and by what.
        """
        own = table.loc[(fault, seed)].loc[:last]
        others = table.loc[""].drop(index=seed, level="seed", errors="ignore")
        by_step = others.groupby(level="step")
        num_others = others.index.get_level_values("seed").nunique()
        z = (own - by_step.mean()) / by_step.std() / sqrt(1 + 1 / num_others)
        p = pd.DataFrame(2 * stats.t.sf(z.abs().fillna(0), num_others - 1), z.index, z.columns)
        p = p.loc[1:last]  # at step 0 nothing is trained
        is_out = (p < (1 - TRUST) / p.size) & ~(by_step.std() == 0).loc[1:last]
        is_out &= is_out.shift(1, fill_value=False)
        steps = is_out.any(axis=1)
        if not steps.any():
            return nan, ""
        step = steps.idxmax()
        return float(step), str(
            p.loc[step].where(is_out.loc[step]).idxmin()[0]
        ) if not is_last else ""

    rows = []
    for fault in (*STARTS, ""):
        seeds = geometry.loc[fault].index.get_level_values("seed").unique()
        found = [leaves(geometry, fault, seed, is_last=False) for seed in seeds]
        of_loss = [leaves(loss, fault, seed, is_last=True) for seed in seeds]
        cells = [fault or "none"]
        for each in (found, of_loss):
            steps = [step for step, _ in each if isfinite(step)]
            text = f"{len(steps)} of {len(each)}"
            cells.append(f"{text}, step {np.median(steps):.0f}" if steps else text)
        keys = [f"`{key}`" for _, key in found if key]
        cells.append(", ".join(f"{key} ({keys.count(key)})" for key in dict.fromkeys(keys)))
        end = [float(loss.loc[(fault, seed, last)].iloc[0]) for seed in seeds]
        cells.append(shown(*mean_and_error(np.array(end))))
        rows.append(cells)
    head = ("fault", "geometry", "held-out loss", "first key", f"held-out loss at step {last}")
    return markdown(head, rows)


# ── figures


def panels(number_of_panels: int, columns: int = 3) -> tuple[Figure, list[Any]]:
    """Axes side by side, in rows."""
    rows = -(-number_of_panels // columns)
    figure = Figure(figsize=(8.4, 2.7 * rows), layout="constrained")
    axes = [*figure.subplots(rows, columns, squeeze=False).flat]
    for ax in axes[number_of_panels:]:
        ax.axis("off")
    return figure, axes[:number_of_panels]


def band(ax: Any, x: Sequence[Any], curves: Array, kind: str, **look: Any) -> None:
    """Mean over seeds, a row each, and their range."""
    (line,) = ax.plot(x, np.nanmean(curves, 0), color=COLOURS[kind], **look)
    ax.fill_between(
        x, np.nanmin(curves, 0), np.nanmax(curves, 0), color=line.get_color(), alpha=0.2, lw=0
    )


def draw_depth(values: Frame) -> Figure:
    """Main numbers over depth."""
    figure, axes = panels(len(DRAWN), 2)
    for ax, metric in zip(axes, DRAWN, strict=True):
        for kind in KINDS:
            frame = chosen(values, kind, "tokens")
            table = frame[frame["metric"] == metric].pivot(
                index="seed", columns="layer_index", values="value"
            )
            names = frame.drop_duplicates("layer_index").set_index("layer_index")["layer"]
            inner = [
                i for i in table.columns if names[i] == "embed" or names[i].startswith("block.")
            ]
            band(
                ax,
                inner,
                table[inner].to_numpy(dtype=float),
                kind,
                label=NAMES[kind],
                marker="o",
                ms=3,
            )
        ax.set(title=DRAWN[metric], xlabel="blocks passed")
    axes[0].legend()
    return figure


def draw_steps(values: Frame, losses: Frame) -> Figure:
    """Main numbers and the loss over training."""
    figure, axes = panels(len(DRAWN) + 1)
    for kind in KINDS:
        held_out = losses[
            (losses["kind"] == kind) & ~losses["is_alarm"] & losses["held_out"].notna()
        ]
        table = held_out.pivot(index="step", columns="seed", values="held_out")
        band(axes[0], table.index, table.to_numpy(dtype=float).T, kind, label=NAMES[kind])
        for ax, metric in zip(axes[1:], DRAWN, strict=True):
            table = over_steps(chosen(values, kind, "training"), metric)
            band(ax, table.index, table.to_numpy(dtype=float).T, kind)
            ax.set_title(DRAWN[metric])
    axes[0].set_title("loss held out, nats")
    last = int(values.loc[~values["is_alarm"], "step"].max())
    for ax in axes:
        ax.set_xscale("function", functions=(np.log1p, np.expm1))
        ticks = [step for step in (0, 1, 10, 100, 1000) if step <= last]
        ax.set(xlabel="optimizer step (log scale)", xlim=(0, last), xticks=ticks)
    axes[0].legend()
    return figure


def frequency_range(values: Frame) -> str:
    """The regression of V on M over token types of other frequencies, at the middle block."""
    rows = []
    for kind in KINDS:
        block = middle(chosen(values, kind, "training"))
        for least, most in COUNT_RANGES:
            frame = chosen(values, kind, f"types {least} to {most}")
            found = [
                shown(*mean_and_error(at_block(frame, metric, block)))
                for metric in ("token_types_regressed", "V_on_M_slope", "V_on_M_r2")
            ]
            rows.append((NAMES[kind], f"{least:,} to {most:,} times", *found))
    return markdown(("", "token types", "number", "slope of V on M", "R²"), rows)


def cosines(values: Frame) -> str:
    """Cosines of rows at the middle block, as they are and after processing."""
    rows = []
    for kind in KINDS:
        for name in PROCESSED:
            frame = chosen(values, kind, f"rows {name}")
            found = [
                shown(*mean_and_error(at_block(frame, metric, str(frame["layer"].iloc[0]))))
                for metric in ("cosine", "cosine_std", "cosine_same", "cosine_pooled")
            ]
            rows.append((NAMES[kind], name, *found))
    head = ("two rows", "their spread", "two of one token", "means of two sequences")
    return markdown(("", "rows", *head), rows)


# ── the page


def tables(values: Frame, losses: Frame, replays: Replays, size: Size) -> dict[str, str]:
    """All tables by their names."""
    found = {
        "models": models(losses, size),
        "claims": claims(values, [claim for claim in CLAIMS if claim.is_on_page]),
        "demo": claims(values, [claim for claim in CLAIMS if not claim.is_on_page]),
        "neighbours": neighbours(values),
        "beyond": beyond_the_loss(values, losses),
        "equal loss": equal_loss(values, losses),
        "final loss": of_final_loss(values, losses),
        "frequency range": frequency_range(values),
        "cosines": cosines(values),
        "alarms": alarms(replays, int(values.loc[values["is_alarm"], "onset"].iloc[0])),
        "from the start": from_the_start(values, losses),
    }
    for kind in KINDS:
        found[f"sampling {kind}"] = sampling(values, kind)
        found[f"gaussian {kind}"] = gaussian(values, kind)
        found[f"errors {kind}"] = errors(values, size, kind)
    return found


def figures(values: Frame, losses: Frame) -> dict[str, Figure]:
    """All figures by their file names."""
    return {
        "findings-depth": draw_depth(values),
        "findings-steps": draw_steps(values, losses),
    }


def places(page: str) -> list[str]:
    """The names of the tables that the page has a place for."""
    return re.findall(r"<!-- table: (.+?) -->", page)


def with_tables(page: str, found: Mapping[str, str]) -> str:
    """The page with other tables between its marks.

    Raises:
        ValueError: there is no table for a place in the page.
    """
    if missing := set(places(page)) - set(found):
        raise ValueError(f"there must be a table for each place of the page; {missing} are none.")
    marked = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
    return marked.sub(lambda match: f"{match[1]}\n{found[match[2]]}\n\n{match[3]}", page)


def as_csv(table: str) -> str:
    """A table of `markdown`, as text of a CSV file."""
    head, _, *rows = (line[2:-2].split(" | ") for line in table.splitlines())
    return pd.DataFrame(rows, columns=pd.Index(head)).to_csv(index=False, lineterminator="\n")


def main(
    size: Literal["full", "small"] = "full",
    folder: Path | None = None,
    page: Path = PAGE,
    processes: int = 2,
) -> None:
    """Do the runs, and write tables and figures.

    Args:
        size: of the runs; the small one writes a copy into the folder.
        folder: of the runs; default: runs/findings/SIZE.
        page: the page that has places for the tables.
        processes: runs that are done at a time.
    """
    folder = folder or Path("runs/findings") / size
    do_runs(size, folder, processes)
    values, losses = read_runs(folder, size)
    replays = all_replays(values, losses, processes)
    out = page if size == "full" else folder / page.name
    found = tables(values, losses, replays, SIZES[size])
    before = page.read_text(encoding="utf-8")
    texts = {out: with_tables(before, found)}
    for name in found.keys() - places(before):
        texts[out.with_suffix("") / f"{name.replace(' ', '-')}.csv"] = as_csv(found[name])
    with rc_context(LOOK):
        for name, figure in figures(values, losses).items():
            file = out.parent / IMAGES / f"{name}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            drawn = BytesIO()
            figure.savefig(drawn, dpi=130)
            save(Image.open(drawn), file)
    changed = 0
    for file, text in texts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        changed += not file.exists() or file.read_text(encoding="utf-8") != text
        file.write_text(text, encoding="utf-8", newline="\n")
    print(f"{out}: {changed} of {len(texts)} files with tables have changed")


if __name__ == "__main__":
    CLI(main)
