"""The numbers of language models that are on this machine, by depth.

    python -m research.real_models FOLDER … [--text FILE …] [--num-tokens 16384] [--seq-len N]
        [--sweeps FOLDER] [--csv FILE]

sweeps each model twice over the same sequences, which begin as its tokenizer has them begin, prints
a table of each, and writes all of them to one file. Columns that end in ``_with_first`` are of all
rows, the others of those without the first position of each sequence. ``_without_massive`` and
``_without_top_dim`` are of what is left without massive rows, or without the largest coordinate; a
cell is empty where no row is massive. ``top_dim`` is the coordinate of the largest variance of the
sampled rows; ``loss`` is in nats a token, where the model predicts tokens.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from math import nan
from pathlib import Path

import pandas as pd

from embedgeo import load_results, load_sample

HEADLINES = [
    "M_over_Q",
    "V_W_over_V_unbiased",
    "anisotropy",
    "mean_cosine",
    "intrinsic_dimension_between",
]
KEYS = [
    *HEADLINES,
    "V_W_over_V",
    "intrinsic_dimension",
    "V_on_M_slope",
    "V_on_M_r2",
    "token_types_regressed",
    "n_massive",
    "top_dim_share",
]
"""Metrics of the table; it also has those of what is left without massive rows or a coordinate."""
WAYS = {"with": ["--count-special", "true"], "without": ["--skip-first-positions", "1"]}
"""Options of the two sweeps, with and without the first position of each sequence."""


def swept(out: Path, options: Sequence[str]) -> pd.DataFrame:
    """The values of a model: a row for each layer, a column for each metric."""
    command = [sys.executable, "-m", "embedgeo.cli", "sweep", *options, "--out", str(out)]
    subprocess.run(command, check=True)
    records = load_results(out)
    of_layers = records[records["layer_index"] >= 0]
    values = of_layers.pivot(index=["layer_index", "layer"], columns="metric", values="value")
    (file,) = (out / "samples").glob("*.safetensors")
    layers = load_sample(out, file.stem).layers.items()
    largest = {name: int(each.rows.float().var(0).argmax()) for name, each in layers}
    loss = records.loc[records["metric"] == "loss", "value"]
    return values.assign(
        top_dim=[largest[name] for name in values.index.get_level_values("layer")],
        loss=loss.iloc[0] if len(loss) else nan,
        weights_sha256=records["weights_sha256"].iloc[0],
    )


def depth_table(
    folder: Path,
    sweeps: Path,
    text: Sequence[str] = (),
    num_tokens: int = 16384,
    seq_len: int | None = None,
) -> pd.DataFrame:
    """The table of a model, a row for each layer: see the module.

    Args:
        folder: the model and its tokenizer, as transformers saves them.
        sweeps: where the sweeps are written, or have been.
        text: files; default: Python's documentation.
        num_tokens: number of tokens, those before a text among them.
        seq_len: tokens in a sequence; default: as many as the model has positions, at most 512.
    """
    options = ["--model", str(folder), "--steps", "final", "--save-samples", "true"]
    options += ["--num-tokens", str(num_tokens)]
    options += ["--seq-len", str(seq_len)] if seq_len else []
    options += ["--text", *map(str, text)] if text else []
    every, rest = (
        swept(sweeps / f"{folder.name}-{way}", [*options, *own]) for way, own in WAYS.items()
    )
    known = f"^({'|'.join(KEYS)})(_without_.*)?$"
    table = rest.filter(regex=known).join(every.filter(regex=known).add_suffix("_with_first"))
    table = table.join(rest[["top_dim", "loss", "weights_sha256"]]).rename_axis(columns=None)
    table = table.reset_index()
    table.insert(0, "model", folder.name)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="of models and their tokenizers")
    parser.add_argument("--text", nargs="+", default=[], help="files; default: Python's pages")
    parser.add_argument("--num-tokens", type=int, default=16384)
    parser.add_argument("--seq-len", type=int, help="default: the model's positions, at most 512")
    parser.add_argument("--sweeps", type=Path, default=Path("runs/real-models"))
    parser.add_argument("--csv", type=Path, help="the table to write")
    given = parser.parse_args(arguments)
    tables = [
        depth_table(folder, given.sweeps, given.text, given.num_tokens, given.seq_len)
        for folder in given.folders
    ]
    for table in tables:
        shown = table.drop(columns=["model", "weights_sha256", "layer_index", "loss"])
        print(f"\n{table['model'][0]}, loss {table['loss'][0]:.3f}:")
        print(shown.set_index("layer").round(3).T.to_string())
    if given.csv is not None:
        pd.concat(tables).to_csv(given.csv, index=False, float_format="%.4g", lineterminator="\n")


if __name__ == "__main__":
    main()
