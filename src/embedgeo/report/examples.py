"""Tables of single token types: examples by their text, and those that vary most and least, or lie nearest the mean."""

from collections.abc import Iterator, Sequence

import pandas as pd
import torch

from embedgeo.functional import REGRESSION_COUNT_RANGE, types_by_frequency
from embedgeo.report.drawing import TableData
from embedgeo.report.runs import Run
from embedgeo.report.tokens import some_layers
from embedgeo.results.wording import number

_LISTED = 10
"""Token types in a list."""

_LEAST_LETTERS = 3
_SYMBOLS = {"distance": "‖μ_t − μ‖²"}
_REGRESSED = "{} ≤ n ≤ {:,}".format(*REGRESSION_COUNT_RANGE)


def extremes(run: Run, layer: str) -> TableData:
    """Which token types vary most and least, and lie nearest the mean, at a layer of the last checkpoint."""
    step, table = max(run.tokens.items())
    at = table[(table["layer"] == layer) & table["n"].between(*REGRESSION_COUNT_RANGE)].set_index("token_id")
    by_variance = at.sort_values(["V", "n"], ascending=[False, False], kind="stable")
    lists = {
        "varies most": (by_variance.head(_LISTED), "V"),
        "varies least": (by_variance.tail(_LISTED).iloc[::-1], "V"),
    }
    for distances in run.distances.values():
        of_layer = distances[distances["layer"] == layer].set_index("token_id")["distance"]
        near = at.assign(distance=of_layer).dropna(subset="distance").nsmallest(_LISTED, "distance")
        lists["nearest the mean"] = near, "distance"
    cells, numbers = [], []
    for name, (types, key) in lists.items():
        cells += [
            pd.Series([spelled(token) for token in types["token"]], name=name, dtype=object),
            pd.Series([number(value) for value in types[key]], name=_SYMBOLS.get(key, key), dtype=object),
            pd.Series([number(n) for n in types["n"]], name="n", dtype=object),
        ]
        rows = types[["token", "n", key]].rename(columns={key: "value"})
        numbers.append(rows.assign(list=name, of=key, rank=range(1, len(rows) + 1)))
    text = f"Of the {len(at):,} token types with {_REGRESSED} occurrences; squared embedding units. ␣ is a space."
    caption = run.titled(f"Token types at {layer}", step)
    every = pd.concat(numbers).reset_index().set_index(["list", "rank"])
    return TableData(f"tokens-extremes-{layer}", caption, pd.concat(cells, axis=1).fillna(""), every, text)


def chosen_types(run: Run, names: Sequence[str]) -> pd.Index:
    """Ids of the token types with these texts, with or without white space around them; without names, as figure 1."""
    _, table = max(run.tokens.items())
    types = table.drop_duplicates("token_id").set_index("token_id", drop=False)
    texts = types["token"].astype(str)
    if not names:
        if run.occurrences:
            return pd.Index(max(run.occurrences.items())[1]["token_id"].unique())
        is_text = torch.tensor((texts.str.strip().str.len() >= _LEAST_LETTERS).to_numpy() | (not has_texts(types)))
        return types.index[types_by_frequency(torch.tensor(types["n"].to_numpy()), is_text).numpy()]
    return types.index[texts.isin(names) | texts.str.strip().isin(names)]


def examples(run: Run, names: Sequence[str]) -> TableData | None:
    """Q, M and V of chosen token types at the last checkpoint (table 2).

    Args:
        run: with tables of token types.
        names: their texts; none: types of every frequency, as in the figure of occurrences.

    Returns:
        None where there are none of them.
    """
    step, table = max(run.tokens.items())
    layers = two_layers(run, table)
    at = table[table["token_id"].isin(chosen_types(run, names)) & table["layer"].isin(layers)]
    if at.empty:
        return None
    numbers = at.set_index(["token_id", "layer"])[["token", "n", "Q", "M", "V"]]
    wide = at.pivot(index="token_id", columns="layer", values=["Q", "M", "V"])
    first = at.drop_duplicates("token_id").set_index("token_id").sort_values("n", ascending=False, kind="stable")
    cells = {"token": [spelled(token) for token in first["token"]], "n": [number(n) for n in first["n"]]}
    for layer in layers:
        for key in "QMV":
            cells[f"{key} at {layer}"] = [number(value) for value in wide[key, layer].reindex(first.index)]
    text = "Squared embedding units; Q = M + V, and V of a single occurrence is 0. ␣ is a space."
    return TableData("tokens-examples", run.titled("Examples", step), pd.DataFrame(cells), numbers, text)


def of_run(run: Run, names: Sequence[str] | None) -> Iterator[TableData]:
    """The tables of a run with token types: at two layers those at the extremes; and, unless None, examples."""
    for layer in two_layers(run, max(run.tokens.items())[1]):
        yield extremes(run, layer)
    if names is not None and (table := examples(run, names)):
        yield table


def require_examples(runs: Sequence[Run], names: Sequence[str]) -> None:
    """Check that each of the texts is that of a token type of some run.

    Raises:
        ValueError: one is of none, or there are no tables of token types.
    """
    with_types = [run for run in runs if run.tokens]
    if not with_types:
        raise ValueError(
            "examples are token types of a sweep's tables; there are none. Sweep with --token-tables true, or leave "
            "examples out."
        )
    if missing := [name for name in names if not any(len(chosen_types(run, [name])) for run in with_types)]:
        raise ValueError(
            f"examples must be texts of token types that occur; {', '.join(map(repr, missing))} is none. Take texts "
            "from the column token of tokens/*.parquet."
        )


def two_layers(run: Run, table: pd.DataFrame) -> list[str]:
    """The middle block and the last one, of those in a table; without blocks, layers in their place."""
    present = set(table["layer"])
    blocks = [layer for layers in run.blocks.values() for layer in layers if layer in present]
    layers = blocks or list(some_layers(run, table))
    return list(dict.fromkeys((layers[(len(layers) - 1) // 2], layers[-1])))


def has_texts(types: pd.DataFrame) -> bool:
    """Whether the texts of token types are known, and not their ids in place of them."""
    return not bool((types["token"].astype(str) == types["token_id"].astype(str)).all())


def spelled(token: object) -> str:
    """A token as it is shown: what cannot be seen as an escape, spaces as ␣."""
    return repr(str(token))[1:-1].replace(" ", "␣")
