"""Metrics at the layers of a model: what the monitor, the sweep and `observe` have in common."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from embedgeo.capture.forward_inputs import ForwardInputs
from embedgeo.capture.layers import Layer, LayerSpec, resolve_layers
from embedgeo.capture.probe import Probe
from embedgeo.functional.distributed import all_reduce_max, is_distributed
from embedgeo.functional.precision import state_device
from embedgeo.functional.rows import RowUnit, pool_tokens, require_row_unit
from embedgeo.metrics import TokenMoments, default_metrics
from embedgeo.results.schema import Record

MetricFactory = Callable[[int], list[Metric]]
"""Makes the metrics of one layer, given the layer's width."""


class Geometry:
    """Metrics for each layer of a model, updated by the forward passes that run while ``probe`` is attached.

    Args:
        model, layers, metrics, skip_first_positions, ignore_token_ids, rows: as for `observe`.
        on_error: called with an exception raised in a hook, to which a note with the layer is added. Default: the
            exception is raised in the forward pass.
        device: the device on which ranks exchange values; default: that of the parameters.
        process_group: the ranks that have different rows; the other ranks repeat the rows of one of these (tensor
            parallelism). Default: all ranks have different rows.

    Raises:
        TypeError, ValueError: a bad argument, layers that are not found, or two metrics with the same key.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: LayerSpec = "blocks",
        metrics: MetricFactory | None = None,
        skip_first_positions: int = 0,
        ignore_token_ids: Sequence[int] = (),
        *,
        rows: RowUnit = "tokens",
        on_error: Callable[[Exception], None] | None = None,
        device: torch.device | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        require_row_unit(rows)
        self._row_unit = rows
        if callable(layers) and isinstance(inner := layers(model), nn.Module):
            model, layers = inner, "blocks"
        self.model = model
        self.layers = resolve_layers(model, layers)
        self._inputs = ForwardInputs(model, skip_first_positions, ignore_token_ids)
        self.probe = Probe(self.layers, self._inputs, self._update, on_error)
        self._make_metrics = metrics or default_metrics
        self._require_distinct_keys()
        self._device = state_device(device or next((p.device for p in model.parameters()), torch.device("cpu")))
        self._group = process_group
        self._is_off = False
        self._metrics: dict[str, list[Metric]] = {}
        self._widths: dict[str, int] = {}

    def records(self) -> list[Record]:
        """A record for each metric at each layer, over the rows of all ranks; every rank must call this.

        Layers that no forward pass has reached, on any rank, are left out.
        """
        values: dict[tuple[int, str], Tensor] = {}
        failures: list[Exception] = []
        for i, metric in self._synced_metrics():
            try:
                values |= {(i, key): v.to(self._device, torch.float64) for key, v in metric.compute().items()}
            except Exception as error:  # raised after the collectives, so that the ranks stay in step
                error.add_note(f"at layer {self.layers[i].name!r}")
                failures.append(error)
        numbers = torch.stack([*values.values()]) if values else torch.zeros(0)
        if self._group is not None:
            self._require_same_values(list(values), numbers, has_failed=bool(failures))
        if failures:
            raise failures[0]
        names = [layer.name for layer in self.layers]
        return [
            Record(layer=names[i], layer_index=i, width=self._widths[names[i]], metric=key, value=value)
            for (i, key), value in zip(values, numbers.tolist(), strict=True)
        ]

    def compute(self) -> dict[str, dict[str, float]]:
        """The values of `records` as ``{layer: {metric: value}}``."""
        values: dict[str, dict[str, float]] = {}
        for record in self.records():
            values.setdefault(record["layer"], {})[record["metric"]] = record["value"]
        return values

    def to_frame(self) -> pd.DataFrame:
        """The values of `records` as a table with the columns layer, layer_index, metric and value."""
        return pd.DataFrame(self.records(), columns=["layer", "layer_index", "metric", "value"])

    def token_tables(self) -> pd.DataFrame:
        """`embedgeo.TokenMoments.table` of every layer; empty if no metric has one. Every rank must call this."""
        return self._of_token_types(TokenMoments.table, ("Q", "M", "V"))

    def token_planes(self) -> pd.DataFrame:
        """`embedgeo.TokenMoments.plane` of every layer; empty if no metric has one. Every rank must call this."""
        return self._of_token_types(TokenMoments.plane, ("pc1", "pc2"))

    def _of_token_types(self, of: Callable[[TokenMoments], dict[str, Tensor]], columns: Sequence[str]) -> pd.DataFrame:
        tables = [pd.DataFrame(columns=["layer", "layer_index", "token_id", "n", *columns])]
        for i, metric in self._synced_metrics(TokenMoments):
            table = {name: column.cpu().numpy() for name, column in of(metric).items()}
            tables.append(pd.DataFrame({"layer": self.layers[i].name, "layer_index": i, **table}))
        return pd.concat(tables[1:] or tables, ignore_index=True)

    def silent_layers(self) -> list[str]:
        """Names of the layers without rows: no forward pass has reached them, after `records` on no rank."""
        return [layer.name for layer in self.layers if layer.name not in self._metrics]

    def reset(self) -> None:
        """Drop the rows seen so far and free their memory."""
        for metrics in self._metrics.values():
            for metric in metrics:
                metric.reset()  # a metric is in a reference cycle: the garbage collector would free it later
        self._metrics.clear()
        self._widths.clear()

    def switch_off(self) -> None:
        """Drop the rows seen and take no more; collectives inside forward passes are still taken part in."""
        self._is_off = True
        self.reset()

    def _update(self, layer: Layer, hidden: Tensor, token_ids: Tensor | None, mask: Tensor | None) -> None:
        hidden = hidden.full_tensor() if isinstance(hidden, DTensor) else hidden
        if self._is_off:
            return
        sequence_ids = self._inputs.sequence_ids(hidden.shape[:-1]) if self._row_unit == "tokens" else None
        hidden, token_ids, mask = pool_tokens(hidden, token_ids, mask, self._row_unit)
        ids = {"token_ids": token_ids, "sequence_ids": sequence_ids}
        if mask is not None:
            mask = mask.to(hidden.device)
            ids = {name: None if each is None else each.to(hidden.device)[mask] for name, each in ids.items()}
            hidden = hidden[mask]
        for metric in self._metrics.get(layer.name) or self._add_metrics(layer.name, hidden.shape[-1]):
            metric.update(hidden, **metric._filter_kwargs(**ids))

    def _add_metrics(self, layer_name: str, dim: int) -> list[Metric]:
        metrics = [metric.to(self._device) for metric in self._make_metrics(dim)]
        for metric in metrics:
            metric._to_sync = False  # `records` does it
            metric.process_group = self._group
        self._metrics[layer_name], self._widths[layer_name] = metrics, dim
        return metrics

    def _synced_metrics(self, kind: type = Metric) -> Iterator[tuple[int, Any]]:
        """Yield the metrics of a kind, each with the index of its layer and, until the next one, all ranks' rows."""
        widths = [self._widths.get(layer.name, 0) for layer in self.layers]
        if is_distributed():
            widths = all_reduce_max(torch.tensor(widths, device=self._device), self._group).tolist()
        for layer, dim in zip(self.layers, widths, strict=True):
            if dim and layer.name not in self._metrics:  # only other ranks have reached it
                no_rows = torch.zeros(0, dim, device=self._device)
                for metric in self._add_metrics(layer.name, dim):
                    metric.update(no_rows, no_rows[:, 0].long())
        for i, layer in enumerate(self.layers):
            for metric in self._metrics.get(layer.name, []):
                if isinstance(metric, kind):
                    metric.sync()
                    try:
                        yield i, metric
                    finally:  # which `sync_context` lacks: the metric would be in sync for ever
                        metric.unsync(should_unsync=metric._is_synced)

    def _require_same_values(self, keys: list[tuple[int, str]], numbers: Tensor, *, has_failed: bool) -> None:
        """Raise ValueError if ranks outside the group have other values; all ranks compare theirs, or none does."""
        if bool(all_reduce_max(torch.tensor(int(has_failed), device=self._device))) or not keys:
            return
        largest = all_reduce_max(torch.stack((numbers, -numbers)).nan_to_num())
        differs = largest.sum(0) > 1e-3 * largest.abs().amax(0)
        if bool(differs.any()):
            i, key = keys[int(differs.nonzero()[0])]
            raise ValueError(
                f"ranks that run one model in parallel must see the same rows at a layer; {key} at layer "
                f"{self.layers[i].name!r} differs between them: each rank has a part of it. Leave the layer out."
            )

    def _require_distinct_keys(self) -> None:
        owners: dict[str, str] = {}
        for metric in self._make_metrics(2):
            if not isinstance(metric, Metric):
                raise TypeError(f"metrics must make torchmetrics metrics; got {type(metric).__name__}.")
            metric.update(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))
            metric._to_sync = False
            name = type(metric).__name__
            for key in metric.compute():
                if key in owners:
                    raise ValueError(
                        f"metrics must have distinct keys; {owners[key]} and {name} both give {key!r}. Leave one out."
                    )
                owners[key] = name


@contextmanager
def observe(
    model: nn.Module,
    layers: LayerSpec = "blocks",
    metrics: MetricFactory | None = None,
    skip_first_positions: int = 0,
    ignore_token_ids: Sequence[int] = (),
    rows: RowUnit = "tokens",
) -> Iterator[Geometry]:
    """Measure the geometry of the hidden states of the forward passes that run inside.

    Args:
        model: any module.
        layers: ``"blocks"``, a pattern of module names, a list of these or a callable on the model: see
            `embedgeo.capture.layers.resolve_layers`.
        metrics: makes the metrics of a layer, given the layer's width; default: `embedgeo.default_metrics`.
        skip_first_positions: leave out this many real positions at the start of every sequence.
        ignore_token_ids: leave out these token ids.
        rows: what a row is: a token (``"tokens"``), or a sequence, by the ``"mean"``, the ``"first"`` or the ``"last"``
            of its tokens that count. Means have no token ids: the metrics that need them are absent.

    Yields:
        A `Geometry`, whose ``compute()`` returns ``{layer: {metric: float}}`` and ``to_frame()`` a table.

    Raises:
        TypeError, ValueError: as `Geometry` does.

    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    >>> with observe(model, layers="1") as geometry:
    ...     _ = model(torch.tensor([[1, 2, 3, 1]]))
    >>> geometry.compute()["01"]["n"]
    4.0
    """
    geometry = Geometry(model, layers, metrics, skip_first_positions, ignore_token_ids, rows=rows)
    with geometry.probe:
        yield geometry
    if silent := geometry.silent_layers():
        warnings.warn(
            f"No forward pass reached {', '.join(silent)}: nothing was measured there. Run the model inside the "
            "with statement, by calling the modules rather than their forward().",
            stacklevel=3,
        )
