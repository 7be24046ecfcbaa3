"""Occurrences of token types of every frequency, as figure 1 of Yamagiwa & Shimodaira 2025.

    python -m research.reproduce yamagiwa2025 --out runs/yamagiwa2025
    python -m research.occurrences runs/yamagiwa2025
    python -m research.reproduce yamagiwa2025 --out runs/yamagiwa2025  # draws them, too

The types are chosen by how often they occur, from the tables of token types of a sweep. Then each
model runs over the same text again, with `TokenOccurrences` in place of the metrics of that sweep
(``--metrics research.occurrences.metrics``). The rows are written to ``occurrences/<name>.parquet``
in the folder of the sweep: the coordinates of each occurrence, its type and the type's frequency.
"""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml
from torch import Tensor
from torch.nn.functional import pad

from embedgeo.functional import REGRESSION_COUNT_RANGE
from embedgeo.metrics import GeometryMetric

_NUM_BINS = 10  # ranges of frequencies
_LEAST_LETTERS = 3
_CHOSEN = "TOKEN_TYPES"  # environment variable: the ids, with commas between them
_SAME = (  # options that say which rows are measured
    "revisions",
    "steps",
    "unit",
    "min_words",
    "max_words",
    "sample",
    "seed",
    "special_tokens",
    "count_special",
    "tokenizer",
    "num_tokens",
    "seq_len",
    "batch_size",
    "layers",
    "rows",
    "types",
    "dtype",
    "skip_first_positions",
    "ignore_token_ids",
)


class TokenOccurrences(GeometryMetric):
    """A uniform sample of the occurrences of chosen token types, in the plane of their own axes.

    It is for one process. ``compute()`` returns no values: see `plane`.

    Args:
        dim: d, the width of the embeddings.
        token_types: the types, by their ids.
        most: how many occurrences of each are kept, drawn without replacement.
        seed: of the sample.
    """

    has_copies = False

    def __init__(self, dim: int, token_types: Sequence[int], most: int = 50, seed: int = 0) -> None:
        super().__init__(dim, tuple(token_types), most, seed)
        self.most = most
        self.random = np.random.default_rng(seed)
        # the rows of each type that have the smallest keys so far, and the keys
        self.kept = {each: (torch.zeros(0, dim), torch.zeros(0)) for each in sorted(token_types)}

    def update_states(self, rows: Any) -> None:
        for token_type, (held, keys) in self.kept.items():
            new = rows.embeddings[rows.token_ids == token_type].cpu()
            both = torch.cat((held.to(new), new))
            drawn = torch.cat((keys, torch.from_numpy(self.random.random(len(new)))))
            smallest = drawn.argsort()[: self.most]
            self.kept[token_type] = both[smallest], drawn[smallest]

    def plane(self) -> dict[str, Tensor]:
        """``token_id``, ``pc1`` and ``pc2`` of each occurrence, shape (m,), by token id."""
        held = [rows for rows, _ in self.kept.values()]
        lengths = torch.tensor([len(rows) for rows in held])
        points = row_plane(torch.cat(held))
        ids = torch.tensor([*self.kept]).repeat_interleave(lengths)
        return {"token_id": ids, "pc1": points[:, 0], "pc2": points[:, 1]}

    def layer_tables(self) -> dict[str, Any]:
        return {"occurrences": self.plane}

    def compute(self) -> dict[str, Tensor]:
        return {}


def row_plane(x: Tensor) -> Tensor:
    """Project rows, shape (n, d), onto the plane in which they vary most; shape (n, 2).

    The zero vector stays at (0, 0). The largest coordinate of each axis is positive.
    """
    rows = x.double()
    axes = torch.linalg.svd(rows - rows.mean(0), full_matrices=False).Vh[:2].T
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    return rows @ pad(axes * largest.sign(), (0, 2 - axes.shape[1]))


def metrics(dim: int) -> list[TokenOccurrences]:
    """The metrics of a layer, of the types that the environment names."""
    return [TokenOccurrences(dim, [int(each) for each in os.environ[_CHOSEN].split(",")])]


def chosen_types(types: pd.DataFrame, seed: int = 0) -> list[int]:
    """Ids of token types of all frequencies, from a table of types.

    Types that occur 10 to 100,000 times are put into ten bins of equal width in log n. Of T_r, the
    types in bin r with three characters or more, 2 + ⌊√(4 |T_r| / max |T_r|)⌋ are drawn at random,
    or all if they are fewer (appendix A of the paper). The authors have since said that the figure
    was made with 2 + ⌊4 √(|T_r| / max |T_r|)⌋: at most six instead of four.
    """
    counted = types[types["n"].between(*REGRESSION_COUNT_RANGE)]
    bins = pd.cut(np.log10(counted["n"]), _NUM_BINS, labels=False)
    is_long = counted["token"].astype(str).str.strip().str.len() >= _LEAST_LETTERS
    of_bins = [of_bin for _, of_bin in counted[is_long].groupby(bins[is_long])]
    most = max(map(len, of_bins), default=1)
    chosen = []
    for of_bin in of_bins:
        wanted = 2 + int((4 * len(of_bin) / most) ** 0.5)
        ids = of_bin["token_id"].sample(min(wanted, len(of_bin)), random_state=seed)
        chosen += ids.tolist()
    return chosen


def write_occurrences(folder: Path) -> None:
    """Sweep the models of a folder again, one by one, and write their occurrences into it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    options = {name: manifest["asked"][name] for name in _SAME if name in manifest["asked"]}
    options |= {"text": manifest["text_files"], "metrics": "research.occurrences.metrics"}
    (folder / "occurrences").mkdir(exist_ok=True)
    for path in sorted(folder.glob("tokens/[!.]*.parquet")):
        table = pd.read_parquet(path)
        model = pd.read_parquet(folder / "checkpoints" / path.name, columns=["model"])["model"]
        chosen = ",".join(map(str, chosen_types(table.drop_duplicates("token_id"))))
        with TemporaryDirectory() as temporary:
            config, out = Path(temporary, "sweep.yaml"), Path(temporary, "out")
            config.write_text(yaml.safe_dump({**options, "model": model.iloc[0], "out": str(out)}))
            subprocess.run(
                [sys.executable, "-m", "embedgeo.cli", "sweep", "--config", str(config)],
                env={**os.environ, _CHOSEN: chosen},
                check=True,
            )
            found = pd.concat(map(pd.read_parquet, out.glob("occurrences/[!.]*.parquet")))
        frequencies = table[["layer", "token_id", "n", "token"]]
        rows = found.drop(columns="token", errors="ignore")
        rows.merge(frequencies, on=["layer", "token_id"]).to_parquet(
            folder / "occurrences" / path.name
        )


if __name__ == "__main__":
    parser = ArgumentParser("python -m research.occurrences")
    parser.add_argument("folder", type=Path, help="of a sweep of final models with token tables")
    write_occurrences(parser.parse_args().folder)
