"""The same rows over the checkpoints of a sweep and through their layers, from its saved samples."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import track
from torch import Tensor

from embedgeo.functional import cka_matrix, drift_values, linearity_values
from embedgeo.layer_names import is_along, layers_below, side
from embedgeo.results.files import remove_leftovers
from embedgeo.results.folder import CKA, SweepFolder, cka_file, drift_file
from embedgeo.results.parquet import RECORD_COLUMNS, SCHEMA, read_metadata, to_frame, write_parquet
from embedgeo.results.records import Record
from embedgeo.results.samples import LayerSample, read_sample, sample_file

_MOST_STEPS, _MOST_LAYERS = 24, 40
"""How many steps, and how many layers, are compared each with each."""

_AT_LAYERS, _AT_STEPS = 5, 3
"""At how many layers the steps, and at how many steps the layers."""

_Layers = Mapping[str, LayerSample]


class Comparison:
    """Compares what a sweep has saved, on at most so many rows."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.folder, self.rows = SweepFolder(folder), rows
        self.runs = list(_runs(self.folder))
        if not self.runs:
            raise ValueError(
                f"drift takes the folder of a sweep with saved samples; {folder} has none. Sweep with --save-samples "
                "true, into another folder."
            )
        self.fewest: float = rows
        self.load = lru_cache(maxsize=3)(self._load)

    def run(self) -> None:
        """Write what is not there yet, a checkpoint at a time, then ``metrics.csv`` and ``tensorboard/`` with it."""
        path = self.folder.path
        remove_leftovers(path, drift_file(path, "").parent)
        console = Console(stderr=True)
        each = [(run, i) for run in self.runs for i in range(len(run))]
        bar: dict[str, Any] = {"console": console, "transient": True, "disable": not console.is_terminal}
        for run, i in track(each, "Comparing rows", **bar):
            self._compare(run[i], {"previous": run[i - 1], "first": run[0]} if i else {})
        about = self._about(name for run in self.runs for name in run)
        if not _is_current(cka_file(path), about):
            tables = pd.DataFrame([row for run in self.runs for row in self._matrices(run)], columns=CKA.names)
            write_parquet(cka_file(path), tables, CKA, about)
        self.folder.rebuild()

    def _compare(self, name: str, others: Mapping[str, str]) -> None:
        """Write the records of a checkpoint, unless they are those of the same samples already."""
        path, about = drift_file(self.folder.path, name), self._about((name, *others.values()))
        if _is_current(path, about):
            return
        layers, records = self.load(name), self.folder.read(name)
        index = records.drop_duplicates("layer").set_index("layer")
        found = []
        for layer, below in zip(layers, layers_below(layers), strict=True):
            values: dict[str, Tensor] = {}
            compared = {suffix: self.load(other).get(layer) for suffix, other in others.items()}
            for suffix, other in {**compared, "below": layers.get(below)}.items():
                if other is not None:
                    here, there = self._common(layers[layer], other)
                    values |= {f"{key}_to_{suffix}": value for key, value in drift_values(there, here).items()}
                    values |= linearity_values(there, here) if suffix == "below" else {}
            at, width = int(index["layer_index"][layer]), int(index["width"][layer])
            found += [
                Record(layer=layer, layer_index=at, width=width, metric=key, value=float(value), stderr=np.nan)
                for key, value in values.items()
            ]
        shared = {str(key): value for key, value in records.iloc[0].drop([*RECORD_COLUMNS]).items()}
        write_parquet(path, to_frame(found, **shared), SCHEMA, about)

    def _matrices(self, run: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Rows of `CKA`: of steps with steps at some layers, then of layers with layers at some steps."""
        step = {name: int(self.folder.read(name)["step"].iloc[0]) for name in run}
        chosen = _thinned(run, _MOST_STEPS)
        layers = _thinned([layer for layer in self.load(run[-1]) if is_along(layer)], _MOST_LAYERS)
        for layer in _thinned(layers, _AT_LAYERS) if len(run) > 1 else ():
            yield from self._matrix([(name, step[name], layer) for name in chosen])
        for name in _thinned(run, _AT_STEPS):
            for part in dict.fromkeys(map(side, layers)):
                yield from self._matrix([(name, step[name], layer) for layer in layers if side(layer) == part])

    def _matrix(self, places: Sequence[tuple[str, int, str]]) -> Iterator[tuple[Any, ...]]:
        found = [(place, self.load(place[0]).get(place[2])) for place in places]
        kept = [(place, layer) for place, layer in found if layer is not None]
        rows = self._common(*(layer for _, layer in kept)) if kept else []
        matrix = cka_matrix(rows).tolist()
        for i, j in combinations_with_replacement(range(len(kept)), 2):
            yield (*kept[i][0], *kept[j][0], len(rows[0]), matrix[i][j])

    def _common(self, *layers: LayerSample) -> list[Tensor]:
        """The rows that all of these have, by their numbers, in the order of the first."""
        rows = [layer.rows for layer in layers if layer.rows is not None]
        numbers = [layer.row_numbers.tolist() for layer in layers if layer.row_numbers is not None]
        if any(each != numbers[0] for each in numbers):
            shared = set(numbers[0]).intersection(*numbers[1:])
            wanted = [number for number in numbers[0] if number in shared]
            places = [{number: i for i, number in enumerate(each)} for each in numbers]
            rows = [x[[at[number] for number in wanted]] for x, at in zip(rows, places, strict=True)]
        self.fewest = min(self.fewest, len(rows[0]))
        return rows

    def _load(self, name: str) -> _Layers:
        layers = read_sample(sample_file(self.folder.path, name), self.rows).layers
        return {layer: sample for layer, sample in layers.items() if sample.rows is not None and len(sample.rows)}

    def _about(self, names: Iterator[str] | Sequence[str]) -> dict[str, str]:
        """What a result was computed from, by which it is known to be still that of these samples."""
        changed = {name: sample_file(self.folder.path, name).stat().st_mtime_ns for name in names}
        return {"rows": str(self.rows), "samples": json.dumps(changed)}


def _runs(folder: SweepFolder) -> Iterator[list[str]]:
    """Names of the checkpoints with samples, by run, in the order of steps; each final model by itself."""
    for checkpoints in folder.runs().values():
        names = [name for name in checkpoints if sample_file(folder.path, name).exists()]
        finals = [name for name in names if folder.facts(name).get("has_step") == "false"]
        yield from filter(None, ([name for name in names if name not in finals], *([name] for name in finals)))


def _thinned(names: Sequence[str], most: int) -> list[str]:
    return [names[round(at)] for at in np.linspace(0, len(names) - 1, min(len(names), most))]


def _is_current(path: Path, about: Mapping[str, str]) -> bool:
    return path.exists() and read_metadata(path).items() >= about.items()
