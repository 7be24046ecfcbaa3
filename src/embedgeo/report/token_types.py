"""Figures and tables of token types, from the tables of the checkpoints."""

import json
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, to_rgba

from embedgeo import drawing as draw
from embedgeo.drawing import FigureData
from embedgeo.formatting import number, with_minus
from embedgeo.functional import (
    REGRESSION_COUNT_RANGE,
    least_squares,
)
from embedgeo.report.page import TableData
from embedgeo.report.runs import Run
from embedgeo.text.frequency import types_by_frequency

WORDS_TEXT = (
    "Rows are words here, a token type is a word, and |T_w| is how many tokens it is made of. A "
    "word's row is the mean over its tokens, which has a smaller norm than they have: Q, M and V "
    "of words of several tokens are smaller for that reason alone, and rare words have more "
    "tokens. Compare words of the same |T_w|; an effect of frequency over all words may be one of "
    "|T_w|."
)  # Yamagiwa & Shimodaira (2025), Appendix J

_RANGE = "{} ≤ n ≤ {:,}".format(*REGRESSION_COUNT_RANGE)
_LINE: dict[str, Any] = {"color": draw.ACCENT, "lw": 1.6}
# numbers of tokens of a word, and their colours
_WORD_SIZES = {"= 1": draw.RUNS[0], "= 2": draw.RUNS[5], "= 3": draw.RUNS[2], "≥ 4": draw.ACCENT}
_PALE = "#c9ccd1"  # of token types outside of the range of the regressions
_LARGEST = 1e100  # value that can be squared
_LONGEST_NAME = 20  # letters of a token that is named in a figure
_LISTED = 10  # token types in a list
_LEAST_LETTERS = 3


class Types(NamedTuple):
    """The token types of a run, from the table of the last step that has one."""

    run: Run
    step: int
    table: pd.DataFrame
    most_layers: int  # at which they are drawn, evenly spaced over the depth

    def layers_to_draw(self) -> list[str]:
        """The layers at which several figures are drawn."""
        return self.run.layers_to_draw(self.table, self.most_layers)


def types_of(run: Run, most_layers: int = 4) -> Types | None:
    """The token types of a run, if it has any that can be drawn."""
    step, table = _last(run, "tokens")
    return Types(run, step, table, most_layers) if len(table) else None


def _last(run: Run, kind: str) -> tuple[int, pd.DataFrame]:
    """The last step with a table of a kind, and its rows that can be drawn: none where there is no
    such table.
    """
    steps = run.steps_of(kind)
    if not steps:
        return 0, pd.DataFrame()
    table = run.read(kind, steps[-1])
    numbers = table[table.columns.intersection(["n", "Q", "M", "V", "pc1", "pc2", "distance"])]
    is_origin = (table["token_id"] < 0) & ("pc1" in table)
    is_drawable = (numbers.abs() <= _LARGEST).all(axis=1) & ((table["n"] >= 1) | is_origin)
    return steps[-1], table[is_drawable] if (table["token_id"] >= 0).any() else table.head(0)


def token_figures(
    run: Run, names: Sequence[str] | None = None, most_layers: int = 4
) -> Iterator[FigureData | TableData]:
    """The figures and tables of token types, examples with these texts among them: see
    `examples`.
    """
    known = types_of(run, most_layers)
    if known:
        yield mean_against_variance(known, names=names or ())
        yield histograms(known)
    yield from occurrences(run)
    if known:
        yield raw_against_frequency(known)
        for layer in two_layers(run, known.table):
            yield extremes(known, layer)
        if names is not None and (table := examples(known, names)):
            yield table


def word_figures(run: Run, most_layers: int = 4) -> Iterator[FigureData]:
    """The figures of words, where token types are words and some are of several tokens."""
    known = types_of(run, most_layers)
    if known and "num_tokens" in known.table and (known.table["num_tokens"] > 1).any():
        for layer in known.layers_to_draw():
            yield words(known, layer)


def mean_against_variance(
    known: Types, layers: Sequence[str] = (), ax: Axes | None = None, names: Sequence[str] = ()
) -> FigureData:
    """V against M of the token types of the last checkpoint, with the regression line; default: at
    some layers.

    Types outside of the range of the regression are pale, and have no room of their own. Those
    with these texts, of which there is one at least, have a ring and their name (figure 8 and
    table 2).
    """
    run, step, table, _ = known
    layers = layers or known.layers_to_draw()
    title = run.titled("V against M" if ax is None else f"V against M at {layers[0]}", step)
    subtitle = f"types with {_RANGE} occurrences, others pale; squared embedding units"
    figure, axes = draw.new_figure(title, subtitle, panels=len(layers), ax=ax)
    table = table[table["layer"].isin(layers)]
    regressed = table[_is_regressed(table)]
    norm = count_bar(axes[-1], regressed["n"], "cividis")
    ids = chosen_types(known, names) if names else pd.Index([])
    texts = []
    for panel, layer in zip(axes, layers, strict=True):
        types = regressed[regressed["layer"] == layer]
        others = table[(table["layer"] == layer) & ~_is_regressed(table)]
        panel.scatter(
            types["M"],
            types["V"],
            s=7,
            c=types["n"],
            norm=norm,
            cmap="cividis",
            lw=0,
            rasterized=True,
        )
        _, fit = draw_line(panel, types["M"], types["V"])
        named = table[(table["layer"] == layer) & table["token_id"].isin(ids)]
        if len(named):
            ring: dict[str, Any] = {"s": 24, "fc": "none", "ec": draw.ACCENT, "lw": 1.1}
            panel.scatter(named["M"], named["V"], zorder=4, **ring)
        panel.autoscale_view()  # of the types so far; to be done before it is switched off
        panel.autoscale(len(types) < 2)
        look: dict[str, Any] = {"s": 5, "color": _PALE, "lw": 0, "rasterized": True}
        panel.scatter(others["M"], others["V"], zorder=0.8, **look)
        if types.empty:
            panel.text(0.5, 0.5, "no type occurs so often", ha="center", transform=panel.transAxes)
        if ax is None:
            panel.set_title(f"{layer}: {fit}", fontsize="small")
        else:
            ax.plot([], label=fit, **_LINE)
            draw.legend(ax)
        panel.set_xlabel("M of the token type")
        draw.round_ticks(panel)
        if len(named):
            _name_types(panel, named.sort_values("n", ascending=False), ("M", "V"))
        texts.append(
            f"{layer}: {fit} over "
            f"{'one token type' if len(types) == 1 else f'{len(types)} token types'}"
        )
    axes[0].set_ylabel("V of the token type")
    numbers = table.set_index(["layer", "token_id"])[["n", "Q", "M", "V"]]
    alt = (
        f"V against M of the token types at {len(layers)} layers, scattered, with regression lines."
    )
    return FigureData("tokens-V-against-M", figure, numbers, alt, "; ".join(texts) + ".")


def count_bar(ax: Axes, counts: pd.Series, cmap: str) -> LogNorm:
    """Add a colour bar for how often token types occur; the scale of its colours."""
    least = float(counts.min()) if len(counts) else 1.0
    norm = LogNorm(least, max(least + 1, float(counts.max()) if len(counts) else 1.0))
    bar = draw.value_bar(ax, ScalarMappable(norm, cmap), "occurrences n (log scale)")
    draw.log_ticks(bar.ax, least, float(norm.vmax or least + 1))
    return norm


def _is_regressed(table: pd.DataFrame) -> "pd.Series[bool]":
    return table["n"].between(*REGRESSION_COUNT_RANGE)


def raw_against_frequency(known: Types) -> FigureData:
    """Q, M and V of the token types, as they are, against how often they occur, at the middle block
    (figure 7).

    Colours are those of `mean_against_variance`; types outside of the range of the regression are
    pale.
    """
    run, step, table, _ = known
    layer = two_layers(run, table)[0]
    types = table[table["layer"] == layer].set_index("token_id")[["n", "Q", "M", "V"]]
    values = types.assign(n=np.log10(types["n"]))
    is_inside = _is_regressed(types).to_numpy()
    regressed = values[is_inside]
    figure, axes = draw.new_figure(
        run.titled(f"Q, M and V against frequency at {layer}", step),
        f"a point a token type, squared embedding units; lines over the types with {_RANGE}",
        panels=3,
    )
    norm = count_bar(axes[-1], types.loc[is_inside, "n"], "cividis")
    colours = np.where(is_inside[:, None], colormaps["cividis"](norm(types["n"])), to_rgba(_PALE))
    slopes = {}
    for ax, key in zip(axes, "QMV", strict=True):
        ax.scatter(values["n"], values[key], s=7, lw=0, c=colours, alpha=0.6, rasterized=True)
        slopes[key], fit = draw_line(ax, regressed["n"], regressed[key])
        ax.set_title(fit, fontsize="small")
        ax.set_xlabel("log10 n, occurrences")
        ax.set_ylabel(f"{key} of the token type")
        least, most, mean = types[key].agg(["min", "max", "mean"])
        reach = 3 * types[key].std(ddof=0)
        if reach > 0 and least < most:  # rounding may make equal values spread
            ax.set_ylim(max(mean - reach, least - reach / 60), min(mean + reach, most + reach / 60))
        ax.yaxis.set_major_formatter(draw.tick_label)
    text = ", ".join(f"{key} {number(slope)}" for key, slope in slopes.items())
    text = f"Slopes over {len(regressed):,} of {len(types):,} token types: {text}. "
    text += "Points farther than three standard deviations from the mean are beyond the axes."
    alt = "Q, M and V of the token types against log frequency, scattered, with regression lines."
    return FigureData("tokens-raw-against-frequency", figure, types, alt, text)


def draw_line(ax: Axes, x: "pd.Series[float]", y: "pd.Series[float]") -> tuple[float, str]:
    """Draw the least-squares line of ``y`` on ``x``, where there is one; its slope, and slope and
    R² in words.
    """
    slope, r2 = (
        float(value)
        for value in least_squares(torch.tensor(x.to_numpy()), torch.tensor(y.to_numpy()))
    )
    if np.isfinite(slope):
        ends = np.array([x.min(), x.max()])
        ax.plot(ends, y.mean() + slope * (ends - x.mean()), **_LINE)
    values = {"slope": slope, "R²": r2}
    words = (
        f"{name} {value:.3g}" if np.isfinite(value) else f"{name} undefined"
        for name, value in values.items()
    )
    return slope, with_minus(", ".join(words))


def histograms(known: Types) -> FigureData:
    """Histograms of Q, M and V over token types at the last checkpoint, a line for each layer."""
    run, step, table, _ = known
    present = run.layers_in(table)
    title = run.titled("Q, M and V over token types", step)
    subtitle = "share of the token types in each bin; at most nine of the layers"
    figure, axes = draw.new_figure(title, subtitle, panels=3)
    colours = draw.depth_bar(axes[-1], present)
    drawn = draw.thinned(len(present), 9)
    shares = {}
    for ax, key in zip(axes, "QMV", strict=True):
        logs = np.log10(table[key].where(table[key] > 0))
        edges = np.histogram_bin_edges(logs.dropna(), 40)
        for i, layer in enumerate(present):
            values = logs[table["layer"] == layer].dropna()
            counts = np.histogram(values, edges)[0] / max(1, len(values))
            if i in drawn:
                ax.stairs(counts, edges, color=colours[i], lw=1.2)
            shares[key, layer] = pd.Series(counts, (edges[1:] + edges[:-1]) / 2)
        ax.set_xlabel(f"log10 {key}, squared embedding units", fontsize="small")
        ax.set_ylim(bottom=0)
    axes[0].set_ylabel("share of token types")
    numbers = pd.concat(shares, names=["value", "layer", "log10"]).rename("share").to_frame()
    last = run.all_blocks[-1]
    found = table[table["layer"] == last][["Q", "M", "V"]].agg(["median", "mean"])
    text = f"At {last}: " + "; ".join(
        f"{kind}s {', '.join(f'{key} {value:.3g}' for key, value in values.items())}"
        for kind, values in found.iterrows()
    )
    alt = "Histograms of Q, M and V over token types, a line for each layer."
    return FigureData("tokens-histograms", figure, numbers, alt, text)


def text_lengths(run: Run) -> dict[int, int]:
    """Texts by their number of tokens; none where all have one length, or it is unknown."""
    written: dict[str, int] = json.loads(run.facts.get("text_lengths", "{}"))
    return {int(length): count for length, count in written.items()}


def occurrences(run: Run) -> Iterator[FigureData]:
    """Occurrences of token types of all frequencies in the plane of their own axes (figure 1)."""
    step, table = _last(run, "occurrences")
    if table.empty:
        return
    table = table[table["token_id"] >= 0]
    layers = two_layers(run, table)
    table = table[table["layer"].isin(layers)]
    title = run.titled("Occurrences of token types of every frequency", step)
    units = "embedding units in the plane in which these rows vary most"
    subtitle = f"{units}; × is the zero vector, a ring the mean of a type"
    figure, axes = draw.new_figure(title, subtitle, panels=len(layers))
    axes[0].set_ylabel("second direction")
    look: dict[str, Any] = {"cmap": "viridis"}
    look["norm"] = count_bar(axes[-1], table["n"], "viridis")
    for ax, layer in zip(axes, layers, strict=True):
        rows = table[table["layer"] == layer]
        ax.scatter(
            rows["pc1"], rows["pc2"], c=rows["n"], s=3, alpha=0.45, lw=0, rasterized=True, **look
        )
        of_types = rows.groupby("token_id")
        means = of_types[["n", "pc1", "pc2"]].mean().assign(token=of_types["token"].first())
        ax.scatter(
            means["pc1"],
            means["pc2"],
            c=means["n"],
            s=20,
            edgecolor="black",
            lw=0.6,
            zorder=3,
            **look,
        )
        ax.plot(0, 0, ls="", marker="x", ms=9, mew=2.2, color=draw.ACCENT, zorder=4)
        ax.set_aspect("equal", adjustable="datalim")
        _name_types(ax, means.sort_values("n", ascending=False))
        ax.set_title(layer, fontsize="small")
        ax.set_xlabel("first direction")
        draw.round_ticks(ax)
    numbers = table.set_index(["layer", "token_id"])[["n", "pc1", "pc2", "token"]]
    ids = table[table["layer"] == layers[0]]["token_id"]
    text = (
        f"{ids.nunique()} token types out of ten bins of log n, {len(ids):,} of their rows, at "
        "most 50 of each; "
    )
    text += "a name is left out where it would cover another."
    alt = (
        "Occurrences of token types in the plane of their two directions of largest variance, "
        "coloured by frequency."
    )
    yield FigureData("tokens-occurrences", figure, numbers, alt, text)


def _name_types(ax: Axes, types: pd.DataFrame, place: tuple[str, str] = ("pc1", "pc2")) -> None:
    """Names beside the places of token types, as they come, but for those that would cover another
    one.
    """
    figure: Any = ax.figure
    figure.draw_without_rendering()
    taken: list[Any] = []
    for token, at in zip(types["token"], types[[*place]].to_numpy(), strict=True):
        label = spelled(token).strip("␣")[:_LONGEST_NAME]
        for right, up in product((True, False), repeat=2):
            offset: dict[str, Any] = {"xytext": (4 if right else -4, 3 if up else -3)}
            look: dict[str, Any] = {"textcoords": "offset points", "fontsize": "x-small"}
            look |= {"ha": "left" if right else "right", "va": "bottom" if up else "top"}
            name = ax.annotate(label, tuple(at), zorder=5, **offset, **look)
            box = name.get_window_extent()
            if not box.count_overlaps(taken):
                taken.append(box)
                break
            name.remove()


def words(known: Types, layer: str) -> FigureData:
    """Q, M and V of the words against log frequency, and V against M, coloured by their number of
    tokens.
    """
    run, step, table, _ = known
    least = 2  # a single occurrence has no variance
    types = table[(table["layer"] == layer) & (table["n"] >= least) & table["num_tokens"].notna()]
    types = types.set_index("token_id")[["n", "Q", "M", "V", "num_tokens"]]
    types["log10 n"] = np.log10(types["n"])
    sizes = types["num_tokens"].round().clip(1, len(_WORD_SIZES))
    title = run.titled(f"Words by their number of tokens |T_w| at {layer}", step)
    subtitle = f"a point a word with n ≥ {least} occurrences; squared embedding units"
    figure, axes = draw.new_figure(title, subtitle, panels=4)
    for ax, (x, y) in zip(
        axes, (("log10 n", "Q"), ("log10 n", "M"), ("log10 n", "V"), ("M", "V")), strict=True
    ):
        for size, (name, colour) in enumerate(_WORD_SIZES.items(), 1):
            of_size = types[sizes == size]
            ax.scatter(of_size[x], of_size[y], s=7, color=colour, alpha=0.6, lw=0, rasterized=True)
            ax.scatter([], [], s=25, color=colour, label=f"|T_w| {name}")
        ax.set_xlabel("log10 n, occurrences" if x != "M" else "M of the word")
        ax.set_ylabel(f"{y} of the word")
        draw.round_ticks(ax)
    draw.legend(axes[0])
    medians = types.groupby(sizes)["Q"].agg(["median", "size"]).itertuples()
    names = {float(i): name for i, name in enumerate(_WORD_SIZES, 1)}
    text = ", ".join(
        f"{number(median)} at |T_w| {names[size]} ({count:,} words)"
        for size, median, count in medians
    )
    alt = (
        f"Q, M and V of words against log frequency, and V against M, at {layer}, coloured by "
        "number of tokens."
    )
    return FigureData(f"words-{layer}", figure, types, alt, f"Median Q: {text or 'no words'}.")


def extremes(known: Types, layer: str) -> TableData:
    """Token types that vary most and least, and lie nearest the mean, at a layer of the last
    checkpoint.
    """
    run, step, table, _ = known
    types = table[(table["layer"] == layer) & _is_regressed(table)].set_index("token_id")
    by_variance = types.sort_values(["V", "n"], ascending=[False, False], kind="stable")
    lists = {"varies most": (by_variance.head(_LISTED), "V", "V")}
    lists["varies least"] = by_variance.tail(_LISTED).iloc[::-1], "V", "V"
    _, distances = _last(run, "distances")
    if len(distances):
        of_layer = distances[distances["layer"] == layer].set_index("token_id")["distance"]
        near = (
            types.assign(distance=of_layer).dropna(subset="distance").nsmallest(_LISTED, "distance")
        )
        lists["nearest the mean"] = near, "distance", "‖μ_t − μ‖²"
    cells = []
    numbers = []
    for name, (listed, key, symbol) in lists.items():
        columns = {
            name: [*map(spelled, listed["token"])],
            symbol: [*map(number, listed[key])],
            "n": [*map(number, listed["n"])],
        }
        cells.append(pd.DataFrame(columns, dtype=object))
        rows = listed[["token", "n", key]].rename(columns={key: "value"})
        numbers.append(rows.assign(list=name, of=key, rank=range(1, len(rows) + 1)))
    text = (
        f"Of the {len(types):,} token types with {_RANGE} occurrences; squared embedding units. ␣ "
        "is a space."
    )
    caption = run.titled(f"Token types at {layer}", step)
    every = pd.concat(numbers).reset_index().set_index(["list", "rank"])
    return TableData(
        f"tokens-extremes-{layer}", caption, pd.concat(cells, axis=1).fillna(""), every, text
    )


def examples(known: Types, names: Sequence[str]) -> TableData | None:
    """Q, M and V of token types at the last checkpoint (table 2): see `chosen_types`; None where
    there are none.
    """
    run, step, table, _ = known
    layers = two_layers(run, table)
    types = table[table["token_id"].isin(chosen_types(known, names)) & table["layer"].isin(layers)]
    if types.empty:
        return None
    numbers = types.set_index(["token_id", "layer"])[["token", "n", "Q", "M", "V"]]
    first = (
        types.drop_duplicates("token_id")
        .set_index("token_id")
        .sort_values("n", ascending=False, kind="stable")
    )
    cells = {
        "token": [spelled(token) for token in first["token"]],
        "n": [number(n) for n in first["n"]],
    }
    for layer in layers:
        at_layer = types[types["layer"] == layer].set_index("token_id").reindex(first.index)
        for key in "QMV":
            cells[f"{key} at {layer}"] = [number(value) for value in at_layer[key]]
    text = "Squared embedding units; Q = M + V, and V of a single occurrence is 0. ␣ is a space."
    return TableData(
        "tokens-examples", run.titled("Examples", step), pd.DataFrame(cells), numbers, text
    )


def chosen_types(known: Types, names: Sequence[str]) -> pd.Index:
    """Ids of the token types with these texts, with or without white space around them; without
    names, as figure 1.
    """
    types = known.table.drop_duplicates("token_id").set_index("token_id", drop=False)
    texts = types["token"].astype(str)
    stripped = texts.str.strip()
    if names:
        return types.index[texts.isin(names) | stripped.isin(names)]
    _, drawn = _last(known.run, "occurrences")
    if len(drawn):
        return pd.Index(drawn["token_id"].unique())
    are_ids = bool((texts == types["token_id"].astype(str)).all())  # in place of texts
    is_text = torch.tensor((stripped.str.len() >= _LEAST_LETTERS).to_numpy() | are_ids)
    return types.index[types_by_frequency(torch.tensor(types["n"].to_numpy()), is_text).numpy()]


def require_examples(found: Sequence[Types | None], names: Sequence[str]) -> None:
    """Check that each of the texts is that of a token type of some run: ValueError if not."""
    with_types = [known for known in found if known]
    if not with_types:
        raise ValueError(
            "examples are token types of a sweep's tables; there are none. Sweep with "
            "--token-tables true, or leave examples out."
        )
    if missing := [
        name for name in names if not any(len(chosen_types(known, [name])) for known in with_types)
    ]:
        raise ValueError(
            f"examples must be texts of token types that occur; {', '.join(map(repr, missing))} is "
            "none. Take texts from the column token of tokens/*.parquet."
        )


def two_layers(run: Run, table: pd.DataFrame) -> list[str]:
    """The middle block and the last one, of those in a table; without blocks, layers in their
    place.
    """
    present = run.layers_in(table)
    layers = [layer for layer in present if layer in run.all_blocks] or run.layers_to_draw(table, 4)
    return list(dict.fromkeys((layers[(len(layers) - 1) // 2], layers[-1])))


def spelled(token: object) -> str:
    """A token as it is shown: what cannot be seen as an escape, spaces as ␣."""
    return repr(str(token))[1:-1].replace(" ", "␣")
