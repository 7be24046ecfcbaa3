"""What was measured: values, tables, samples, and all of them in a folder."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from embedgeo.capture.layers import Layer
from embedgeo.capture.norms import Norms
from embedgeo.geometry import saving, tables
from embedgeo.geometry.computing import Reached
from embedgeo.geometry.display import html_table
from embedgeo.metrics import TokenMoments
from embedgeo.metrics.checks import require_samples
from embedgeo.metrics.layer import MetricFactory
from embedgeo.results.samples import LayerSample
from embedgeo.results.schema import Record

if TYPE_CHECKING:
    import pandas as pd


class Results(ABC):
    """The results of `embedgeo.Geometry`."""

    model: nn.Module
    layers: Sequence[Layer]
    norms: Norms
    make_metrics: MetricFactory
    settings: dict[str, Any]
    _device: torch.device

    @abstractmethod
    def records(self) -> list[Record]:
        """A record for each metric at each layer, over the rows of all ranks; every rank must call this."""

    @abstractmethod
    def why_silent(self) -> str:
        """A sentence that names the layers without rows and the reason; empty if there are none."""

    @abstractmethod
    def _reached(self, *, copied: bool = False) -> list[Reached]:
        """The layers that have rows on any rank; every rank must call this."""

    def compute(self) -> dict[str, dict[str, float]]:
        """The values of `records` as ``{layer: {metric: value}}``."""
        values = dict[str, dict[str, float]]()
        for record in self.records():
            values.setdefault(record["layer"], {})[record["metric"]] = record["value"]
        return values

    def to_frame(self) -> "pd.DataFrame":
        """The values of `records` as a table with the columns layer, layer_index, metric, value and stderr."""
        return tables.of_records(self.records())

    _repr_html_ = html_table

    def token_tables(self) -> "pd.DataFrame":
        """`embedgeo.TokenMoments.table` of every layer; empty if no metric has one. Every rank must call this."""
        return tables.of_token_types("token_tables", self._reached(), TokenMoments.table, ("Q", "M", "V"))

    def token_planes(self) -> "pd.DataFrame":
        """`embedgeo.TokenMoments.plane` of every layer; empty if no metric has one. Every rank must call this."""
        return tables.of_token_types("token_planes", self._reached(), TokenMoments.plane, ("pc1", "pc2"))

    def layer_tables(self) -> "dict[str, pd.DataFrame]":
        """All eigenvalues (``spectra``) and the largest ``coordinates``, where metrics have them; for every rank."""
        return tables.of_layers(self._reached())

    def samples(self) -> dict[str, LayerSample]:
        """The sampled rows, the mean and the eigenvalues at every layer; every rank must call this.

        Raises:
            ValueError: the metrics hold none of these.
        """
        require_samples(self.make_metrics)
        sampled = ((each.layer.name, saving.layer_sample(each.metrics)) for each in self._reached())
        return {name: sample for name, sample in sampled if sample is not None}

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        model: str,
        step: int | None = None,
        save_samples: bool = False,
        token_tables: bool = False,
    ) -> None:
        """Write what was measured into a folder as `embedgeo sweep` makes it, for `embedgeo report`.

        The checkpoint is called ``<model>`` or ``<model>--step<N>``; what the folder has under that name is replaced,
        and what it has under others stays. Nothing changes here: more rows may follow. Every rank must call this, and
        rank 0 writes.

        Args:
            folder: a new one, or one that this method has made with the same settings.
            model: name of the model; those of one name are a series of steps.
            step: the number of optimizer steps that the weights have taken; None: they are no step's, as a final
                model's.
            save_samples: also write ``samples/<name>.safetensors``, for `embedgeo.load_sample`.
            token_tables: also write ``tokens/<name>.parquet``, as ``embedgeo sweep --token-tables true`` does.

        Raises:
            ValueError: no name, one too long or a negative step, nothing was measured, or the folder holds something
                else: a sweep, results of other settings, or another model's under a name that looks the same.
            OSError: it cannot be written.
            RuntimeError: rank 0 has failed.
        """
        kept = {"save_samples": save_samples, "token_tables": token_tables}
        saving.save(self, folder, model=model, step=step, **kept, device=self._device)
