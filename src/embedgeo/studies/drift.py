"""Saved rows of a sweep compared over its checkpoints and through their layers: the command
``embedgeo drift``.
"""

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

from embedgeo.layer_names import is_along, layers_below, side
from embedgeo.results.files import remove_leftovers
from embedgeo.results.folder import CKA, SweepFolder, cka_file, drift_file
from embedgeo.results.parquet import RECORD_COLUMNS, SCHEMA, read_metadata, to_frame, write_parquet
from embedgeo.results.records import Record, block_means
from embedgeo.results.samples import LayerSample, read_sample, sample_file
from embedgeo.studies.representations import cka_matrix, drift_values, linearity_values

# of each checkpoint the means over blocks are printed
_SHOWN = ("cka_to_previous", "cka_to_first", "cka_to_below", "linearity_without_residual")
_MOST_STEPS = 24  # that are compared each with each
_MOST_LAYERS = 40
_AT_LAYERS = 5  # at which the steps are compared
_AT_STEPS = 3  # at which the layers are compared


class Comparison:
    """Compares what a sweep has saved, on at most so many rows; ``fewest_rows`` is how many it came
    down to.
    """

    def __init__(self, folder: Path, num_rows: int) -> None:
        self._folder = SweepFolder(folder)
        self._num_rows = num_rows
        # names of the checkpoints in the order of steps; each final model by itself
        self._runs: list[list[str]] = []
        for checkpoints in self._folder.runs().values():
            names = [name for name in checkpoints if sample_file(self._folder.path, name).exists()]
            finals = [name for name in names if self._folder.facts(name).get("has_step") == "false"]
            self._runs += filter(
                None, ([name for name in names if name not in finals], *([name] for name in finals))
            )
        if not self._runs:
            raise ValueError(
                f"drift takes the folder of a sweep with saved samples; {folder} has none. Sweep "
                "with --save-samples true, into another folder."
            )
        self._layers = lru_cache(maxsize=3)(self._read_layers)
        if not any(self._layers(name) for run in self._runs for name in run):
            raise ValueError(
                f"drift compares saved rows; the samples in {folder} have none, as the metrics of "
                "the sweep draw none. Sweep with --save-samples true and metrics with "
                "IntrinsicDimension, as the default ones, into another folder."
            )
        self.fewest_rows = num_rows

    def write(self) -> tuple[int, int]:
        """Write what is not there yet, a checkpoint at a time, then ``metrics.csv`` and
        ``tensorboard/`` with it.

        A line is printed for each checkpoint that is written. Their number, and that of all, are
        returned.
        """
        path = self._folder.path
        remove_leftovers(path, drift_file(path, "").parent)
        console = Console()
        num_new = 0
        checkpoints = [(run, i) for run in self._runs for i in range(len(run))]
        is_silent = not console.is_terminal
        for run, i in track(
            checkpoints, "Comparing rows", console=console, transient=True, disable=is_silent
        ):
            others = {"previous": run[i - 1], "first": run[0]} if i else {}
            records = self._write_drift(run[i], others)
            if records:
                num_new += 1
                means = {
                    each["metric"]: f"{each['metric']} {each['value']:.4g}"
                    for each in block_means(records)
                }
                shown = [means[key] for key in _SHOWN if key in means]
                line = ", ".join([run[i], *shown])
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        origin = self._origin([name for run in self._runs for name in run])
        if not _is_current(cka_file(path), origin):
            rows = [row for run in self._runs for row in self._cka_rows(run)]
            write_parquet(cka_file(path), pd.DataFrame(rows, columns=CKA.names), CKA, origin)
        self._folder.rebuild()
        return num_new, len(checkpoints)

    def _write_drift(self, name: str, others: Mapping[str, str]) -> list[Record]:
        """Write the records of a checkpoint, which are returned; none where they are there
        already.
        """
        path = drift_file(self._folder.path, name)
        origin = self._origin([name, *others.values()])
        if _is_current(path, origin):
            return []
        layers = self._layers(name)
        measured = self._folder.read(name)
        places = measured.drop_duplicates("layer").set_index("layer")
        records: list[Record] = []
        for layer, below in zip(layers, layers_below(layers), strict=True):
            references = {
                suffix: self._layers(other).get(layer) for suffix, other in others.items()
            }
            references["below"] = layers.get(below)
            values: dict[str, Tensor] = {}
            for suffix, reference in references.items():
                if reference is not None:
                    here, there = self._common_rows(layers[layer], reference)
                    values |= {
                        f"{key}_to_{suffix}": value
                        for key, value in drift_values(there, here).items()
                    }
                    if suffix == "below":
                        values |= linearity_values(there, here)
            index = int(places["layer_index"][layer])
            width = int(places["width"][layer])
            records += [
                Record(
                    layer=layer,
                    layer_index=index,
                    width=width,
                    metric=key,
                    value=float(value),
                    stderr=np.nan,
                )
                for key, value in values.items()
            ]
        shared = {
            str(key): value for key, value in measured.iloc[0].drop([*RECORD_COLUMNS]).items()
        }
        write_parquet(path, to_frame(records, **shared), SCHEMA, origin)
        return records

    def _cka_rows(self, run: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Rows of `CKA`: of steps with steps at some layers, then of layers with layers at some
        steps.
        """
        steps = {name: int(self._folder.read(name)["step"].iloc[0]) for name in run}
        layers = _thinned(
            [layer for layer in self._layers(run[-1]) if is_along(layer)], _MOST_LAYERS
        )
        for layer in _thinned(layers, _AT_LAYERS) if len(run) > 1 else ():
            yield from self._each_with_each(
                [(name, steps[name], layer) for name in _thinned(run, _MOST_STEPS)]
            )
        for name in _thinned(run, _AT_STEPS):
            for part in dict.fromkeys(map(side, layers)):
                yield from self._each_with_each(
                    [(name, steps[name], each) for each in layers if side(each) == part]
                )

    def _each_with_each(self, places: Sequence[tuple[str, int, str]]) -> Iterator[tuple[Any, ...]]:
        found = [(place, self._layers(place[0]).get(place[2])) for place in places]
        kept = [(place, layer) for place, layer in found if layer is not None]
        rows = self._common_rows(*(layer for _, layer in kept)) if kept else []
        matrix = cka_matrix(rows).tolist()
        for i, j in combinations_with_replacement(range(len(kept)), 2):
            yield (*kept[i][0], *kept[j][0], len(rows[0]), matrix[i][j])

    def _common_rows(self, *layers: LayerSample) -> list[Tensor]:
        """The rows that all of these have, by their numbers, in the order of the first."""
        rows = [layer.rows for layer in layers if layer.rows is not None]
        numbers = [layer.row_numbers.tolist() for layer in layers if layer.row_numbers is not None]
        if any(each != numbers[0] for each in numbers):
            shared = set(numbers[0]).intersection(*numbers[1:])
            wanted = [number for number in numbers[0] if number in shared]
            places = [{number: i for i, number in enumerate(each)} for each in numbers]
            rows = [
                x[[at[number] for number in wanted]] for x, at in zip(rows, places, strict=True)
            ]
        self.fewest_rows = min(self.fewest_rows, len(rows[0]))
        return rows

    def _read_layers(self, name: str) -> Mapping[str, LayerSample]:
        layers = read_sample(sample_file(self._folder.path, name), self._num_rows).layers
        return {
            layer: sample
            for layer, sample in layers.items()
            if sample.rows is not None and len(sample.rows)
        }

    def _origin(self, names: Sequence[str]) -> dict[str, str]:
        return {"rows": str(self._num_rows), **self._folder.origin(names)}


def _thinned(names: Sequence[str], most: int) -> list[str]:
    return [names[round(at)] for at in np.linspace(0, len(names) - 1, min(len(names), most))]


def _is_current(path: Path, origin: Mapping[str, str]) -> bool:
    return path.exists() and read_metadata(path).items() >= origin.items()
