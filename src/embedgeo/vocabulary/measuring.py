"""What measures the embedding matrices of a checkpoint."""

import tempfile
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from embedgeo.capture.layers import Layer
from embedgeo.checkpoints.matrices import Matrices, needed_contents, read_matrices
from embedgeo.geometry.computing import Reached, computed
from embedgeo.geometry.saving import layer_sample
from embedgeo.geometry.tables import of_layers
from embedgeo.metrics.layer import LayerMetrics
from embedgeo.results.samples import LayerSample
from embedgeo.results.schema import Record, model_record
from embedgeo.sweep.downloads import Downloads
from embedgeo.sweep.measure import Measured
from embedgeo.sweep.metrics import metric_factory
from embedgeo.sweep.plan import Planned
from embedgeo.sweep.settings import SweepSettings
from embedgeo.sweep.tokenizers import small_files
from embedgeo.vocabulary.named import NamedRows, Names

INPUT, OUTPUT = "input_embedding", "output_embedding"
"""The names of the matrices, as layers."""


@dataclass
class MatrixWorker:
    """Measures the embedding matrices of checkpoints, one checkpoint at a time.

    Args:
        settings: the options that a sweep has, too.
        names: of the tokens of each model, by `Checkpoint.model`; None of one without a tokenizer.
        downloads: where to.
        only_trained: leave out rows that no token uses or that look untrained.
    """

    settings: SweepSettings
    names: Mapping[str, Names | None]
    downloads: Downloads
    only_trained: bool

    def measured(self, planned: Planned, upcoming: Callable[[], Planned | None]) -> Measured:
        """Measure the matrices of a checkpoint, while the files of the next one are fetched.

        Args:
            planned: the checkpoint.
            upcoming: chooses the next one.

        Raises:
            Exception: of any kind: it cannot be fetched, read or measured.
        """
        try:
            planned = self._narrowed(planned)
            path = self.downloads.start(planned).result()
            if path.is_file():
                raise ValueError(f"a vocabulary is that of a Hugging Face model; {path.name} is a file of Lightning's.")
            assert planned.contents is not None
            matrices = read_matrices(path, planned.contents, **self._loading)
            if (following := upcoming()) is not None:
                self.downloads.start(self._narrowed(following))
            return self._of_both(matrices, self.names[planned.checkpoint.model])
        finally:
            self.downloads.remove(planned)

    @property
    def _loading(self) -> dict[str, Any]:
        return {"dtype": getattr(torch, self.settings.dtype), "trust_remote_code": self.settings.trust_remote_code}

    def _narrowed(self, planned: Planned) -> Planned:
        """The checkpoint with no more of its files on the Hub than have to be fetched."""
        contents = planned.contents
        if contents is None or planned.checkpoint.path is not None or len(contents.weights) < 3:
            return planned
        small = [file.name for file in contents.files if file.name == "config.json" or "index" in file.name]
        with tempfile.TemporaryDirectory(prefix="embedgeo-") as name:
            folder = small_files(planned, small, Path(name))
            trusted = self.settings.trust_remote_code
            return replace(planned, contents=needed_contents(contents, folder, trust_remote_code=trusted))

    def _of_both(self, matrices: Matrices, names: Names | None) -> Measured:
        """What there is to say of both matrices; where they are one, it is measured once."""
        of_input = self._of_one(INPUT, 0, matrices.input, names)
        parts = [of_input]
        if matrices.is_tied:
            records, tables, sample = of_input
            again = [Record(**{**record, "layer": OUTPUT, "layer_index": 1}) for record in records]
            tables = {kind: table.assign(layer=OUTPUT, layer_index=1) for kind, table in tables.items()}
            parts.append((again, tables, deepcopy(sample)))
        elif matrices.output is not None:
            parts.append(self._of_one(OUTPUT, 1, matrices.output, names))
        records = [record for records, _, _ in parts for record in records]
        if len(parts) > 1:
            records.append(model_record("tied_embeddings", float(matrices.is_tied)))
        samples = {layer: sample for layer, (_, _, sample) in zip((INPUT, OUTPUT), parts, strict=False) if sample}
        return Measured(
            records,
            {kind: pd.concat([tables[kind] for _, tables, _ in parts], ignore_index=True) for kind in of_input[1]},
            {"model_class": matrices.model_class},
            samples if self.settings.save_samples else None,
        )

    def _of_one(
        self, layer: str, layer_index: int, matrix: Tensor, names: Names | None
    ) -> tuple[list[Record], dict[str, pd.DataFrame], LayerSample | None]:
        """The records of a matrix, its tables by kind, and its sample, where that is asked for."""
        rows = NamedRows.of(matrix, names)
        kept = rows.trained() if self.only_trained else torch.arange(len(matrix))
        metrics = LayerMetrics(metric_factory(self.settings), matrix.shape[1], device=matrix.device)
        with torch.inference_mode():
            metrics.update(matrix if len(kept) == len(matrix) else matrix[kept])
            reached = [Reached(layer_index, Layer(layer, ()), metrics)]
            numbers = computed(lambda: reached)
            tables = of_layers(reached)
            sample = layer_sample(metrics) if self.settings.save_samples else None
        if sample is not None and sample.row_numbers is not None:
            sample = replace(sample, row_numbers=kept[sample.row_numbers])
        records = numbers.records([""] * layer_index + [layer])
        for metric, count in rows.counts().items():
            records.append(Record(**{**records[0], "metric": metric, "value": count, "stderr": torch.nan}))
        tables["vocabulary"] = rows.table(names).assign(layer=layer, layer_index=layer_index)
        return records, tables, sample
