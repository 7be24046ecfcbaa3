"""A training run, or a final model, as the figures need it: its records as tables of metrics at steps and layers."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from embedgeo.layer_names import blocks_by_side, is_along, side
from embedgeo.results.folder import CKA
from embedgeo.results.records import MODEL

_LARGEST = 1e300
_ABOUT = ["model", "revision", "weights_sha256", "duplicate_of"]
_SPREADS = {"anisotropy_batch_mean": "anisotropy_batch_std", "intrinsic_dimension": "intrinsic_dimension_std"}
"""Means over batches of rows, and their standard deviations over them."""


class Bands(NamedTuple):
    """How far to each side of its lines the bands of a metric reach.

    Attributes:
        values: at each step (rows) and layer (columns); NaN where unknown.
        means: of the means over blocks, at each step: the means of the blocks' own.
        is_spread: whether they are standard deviations over batches of rows, not standard errors.
    """

    values: pd.DataFrame
    means: pd.DataFrame
    is_spread: bool


@dataclass(frozen=True)
class Run:
    """One training run, or one final model.

    Attributes:
        label: its name.
        layers: names in forward order.
        values: a column per metric; the index is (step, layer).
        errors: standard errors of the values, shaped as ``values``; NaN where unknown.
        widths: d at each row of ``values``; NaN where unknown.
        baseline: the values of Gaussian embeddings, shaped as ``values``; NaN where unknown.
        model: a column per metric of the whole model, such as the loss; the index is the step.
        checkpoints: model, revision, weights_sha256 and duplicate_of, where known; the index is the step.
        tokens: tables of token types of the first, a middle and the last checkpoint that have one, by step.
        projections: the last checkpoint's table of chosen tokens in the plane, by step.
        spectra: eigenvalues of some checkpoints, by step: see `embedgeo.report.spectra.read_spectra`.
        coordinates: tables of the largest coordinates of all checkpoints that have one, by step.
        occurrences: the last checkpoint's table of occurrences of chosen tokens in their plane, by step.
        distances: the last checkpoint's table of how far token types are from the mean, by step.
        text_lengths: how many texts were measured of each length in tokens; none where it was one length, or unknown.
        failures: reasons, by name of a checkpoint that failed.
        apart: checkpoints of each run, by its name, where it was told from other models of its series.
        cka: similarity of steps and of layers, as `embedgeo drift` has found it; the columns are those of `CKA`.
        has_steps: whether it is a training run; a final model is of no step, and stands at step 0.
        group: the name of its group of models, if it is in one.
        num_parameters: of the last checkpoint's model; NaN where unknown.
    """

    label: str
    layers: list[str]
    values: pd.DataFrame
    errors: pd.DataFrame
    widths: pd.Series
    baseline: pd.DataFrame
    model: pd.DataFrame
    checkpoints: pd.DataFrame
    tokens: dict[int, pd.DataFrame] = field(default_factory=dict)
    projections: dict[int, pd.DataFrame] = field(default_factory=dict)
    spectra: dict[int, pd.DataFrame] = field(default_factory=dict)
    coordinates: dict[int, pd.DataFrame] = field(default_factory=dict)
    occurrences: dict[int, pd.DataFrame] = field(default_factory=dict)
    distances: dict[int, pd.DataFrame] = field(default_factory=dict)
    text_lengths: dict[int, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    apart: dict[str, str] = field(default_factory=dict)
    cka: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=CKA.names))
    has_steps: bool = True
    group: str = ""
    num_parameters: float = np.nan

    @property
    def metrics(self) -> list[str]:
        """Names of the layers' metrics."""
        return [str(metric) for metric in self.values]

    @property
    def steps(self) -> list[int]:
        """Measured steps."""
        return [int(step) for step in self.values.index.unique("step").sort_values()]

    @property
    def depth(self) -> list[str]:
        """The layers that lie along the model, without means over several."""
        return [layer for layer in self.layers if is_along(layer)]

    @property
    def axis(self) -> list[str]:
        """`depth` with a gap, named "", between an encoder and its decoder."""
        sides = groupby(self.depth, side)
        return [layer for _, layers in sides for layer in ("", *layers)][1:]

    @property
    def blocks(self) -> dict[str, list[str]]:
        """The blocks by the name of their mean, of encoder and decoder apart; all layers where no layer is a block."""
        blocks = blocks_by_side(self.depth) or {"": self.depth}
        return {f"{part[:-1]} mean" if part else "mean over blocks": layers for part, layers in blocks.items()}

    def table(self, metric: str, values: pd.DataFrame | None = None) -> pd.DataFrame:
        """A metric at each step (rows) and layer (columns)."""
        column = (self.values if values is None else values)[metric].to_numpy()
        steps, places = self._places
        known = column[places] if len(column) else np.empty(places.shape)
        return pd.DataFrame(np.where(places < 0, np.nan, known), steps, pd.Index(self.layers, name="layer"))

    @cached_property
    def _places(self) -> tuple[pd.Index, NDArray[np.intp]]:
        """The measured steps, and the row of ``values`` of each (rows) at each layer; -1 where there is none."""
        steps = self.values.index.unique("step").sort_values()
        rows = self.values.index.get_indexer(pd.MultiIndex.from_product([steps, self.layers]))
        return steps, rows.reshape(len(steps), len(self.layers))

    def means(self, table: pd.DataFrame) -> pd.DataFrame:
        """Means over blocks, of encoder and decoder apart, at each row of a table of layers (columns)."""
        return pd.DataFrame({name: table[blocks].mean(axis=1) for name, blocks in self.blocks.items()})

    def mean_errors(self, metric: str) -> pd.DataFrame:
        """Upper bounds of the standard errors of `means`: the means of the blocks' own, for blocks may err together."""
        return self._mean_errors(self.table(metric), self.table(metric, self.errors))

    def bands(self, metric: str) -> "Bands":
        """What is drawn around the values of a metric: standard errors; else the spread over batches of rows."""
        table, errors, std = self.table(metric), self.table(metric, self.errors), _SPREADS.get(metric)
        is_spread = False
        if std in self.values and not errors.notna().to_numpy().any():
            spread = self.table(str(std)).where(table.notna())
            errors = spread.where(spread >= 0)
            is_spread = bool(errors.notna().to_numpy().any())
        return Bands(errors, self._mean_errors(table, errors), is_spread=is_spread)

    def _mean_errors(self, table: pd.DataFrame, errors: pd.DataFrame) -> pd.DataFrame:
        return self.means(errors.fillna(np.inf).where(table.notna())).replace(np.inf, np.nan)

    def titled(self, title: str, step: int) -> str:
        """A title with the step, of which a final model has none."""
        return f"{title}, step {step:,}" if self.has_steps else title

    def varies(self, metric: str) -> bool:
        """Whether a metric was measured and has more than one value."""
        return metric in self.values and self.values[metric].nunique() > 1


def make_run(label: str, records: pd.DataFrame, **more: Any) -> Run:
    """A run from records in a table; ``more`` sets further attributes. Its baseline is unknown.

    An infinite value at a layer counts as undefined.
    """
    of_model = records["layer"] == MODEL
    at_layers = records[~of_model]
    order = at_layers.drop_duplicates("layer").sort_values("layer_index")["layer"]
    values = drawable(_wide(at_layers, ["step", "layer"]))
    errors = drawable(_wide(at_layers, ["step", "layer"], "stderr"))
    widths = at_layers.groupby(["step", "layer"])["width"].last().reindex(values.index).astype(float)
    about = records.drop_duplicates("step", keep="last").set_index("step").sort_index()
    about = about.reindex(columns=_ABOUT).astype(object)
    about = about.where(about.notna(), "")
    about["revision"] = about["revision"].where(about["revision"] != "", "step" + about.index.astype(str))
    return Run(
        label=label,
        layers=[str(layer) for layer in order],
        values=values,
        errors=errors.where((errors >= 0) & values.notna()),
        widths=widths.where(widths > 0),
        baseline=values * np.nan,
        model=_wide(records[of_model], ["step"]),
        checkpoints=about,
        **more,
    )


def drawable(values: pd.DataFrame) -> pd.DataFrame:
    """Values, undefined where they are infinite, or so large that the length of an axis would be."""
    return values.where(values.abs() <= _LARGEST)


def _wide(records: pd.DataFrame, index: list[str], column: str = "value") -> pd.DataFrame:
    """A column of records as one for each metric; of what is there twice, the last."""
    last = records.drop_duplicates([*index, "metric"], keep="last")
    return last.pivot(index=index, columns="metric", values=column).sort_index().astype(float)
