"""Metrics at the layers of a model: the engine that the monitor, the sweep and notebooks share."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from embedgeo.capture.layers import Layer, LayerSpec, resolve_layers
from embedgeo.capture.probe import Probe
from embedgeo.functional.distributed import all_reduce_max, is_distributed
from embedgeo.functional.precision import state_device
from embedgeo.functional.rows import RowUnit, pool_tokens, require_row_unit
from embedgeo.metrics import TokenMoments, default_metrics
from embedgeo.results.schema import Record

MetricFactory = Callable[[int], list[Metric]]
"""Makes the metrics of one layer, given its width."""


class Geometry:
    """One set of metrics for each layer of a model, updated by the forward passes that run while attached.

    Args:
        model, layers, metrics, skip_first_positions, ignore_token_ids, rows: see `observe`.
        on_error: takes what goes wrong in a hook; None raises it in the forward pass. A note names the layer.
        device: where ranks exchange what is not at a layer; default: that of the parameters.
        process_group: the ranks that have different rows; the others (tensor parallel) repeat those of one of
            these. None: all ranks have different rows.

    Raises:
        TypeError: an argument of the wrong type, or metrics that are none.
        ValueError: layers that are not found, two metrics with the same key, or a negative number.
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
        if callable(layers) and isinstance(part := layers(model), nn.Module):
            model, layers = part, "blocks"
        self.model = model
        self.layers = resolve_layers(model, layers)
        self.probe = Probe(
            model,
            self.layers,
            self._update,
            on_error=on_error,
            skip_first_positions=skip_first_positions,
            ignore_token_ids=ignore_token_ids,
        )
        self._make_metrics = default_metrics if metrics is None else metrics
        self._require_distinct_keys()
        self._device = state_device(device or next((p.device for p in model.parameters()), torch.device("cpu")))
        self._group = process_group
        self._is_off = False
        self._metrics: dict[str, list[Metric]] = {}
        self._widths: dict[str, int] = {}

    def compute(self) -> dict[str, dict[str, float]]:
        """The values by layer and metric: see `records`."""
        values: dict[str, dict[str, float]] = {}
        for record in self.records():
            values.setdefault(record["layer"], {})[record["metric"]] = record["value"]
        return values

    def records(self) -> list[Record]:
        """A record for each metric at each layer, over the rows of all ranks; every rank must call this.

        A layer that no forward pass has reached, on any rank, is left out.
        """
        self._match_ranks()
        values: dict[tuple[str, str], Tensor] = {}
        failures: list[Exception] = []
        for layer in self.layers:
            for metric in self._metrics.get(layer.name, []):
                with _over_ranks(metric):
                    try:
                        values.update({(layer.name, key): value for key, value in metric.compute().items()})
                    except Exception as error:  # after the collectives: the other ranks are in step
                        error.add_note(f"at layer {layer.name!r}")
                        failures.append(error)
        has_failed = bool(failures)
        if self._group is not None:  # all ranks compare what they have come to, or none does
            has_failed = bool(all_reduce_max(torch.tensor(int(has_failed), device=self._device)))
        if failures:
            raise failures[0]
        if not values:
            return []
        numbers = torch.stack([v.to(self._device, torch.float64) for v in values.values()])
        if self._group is not None and not has_failed:
            self._require_repeated_rows(list(values), numbers)
        index = {layer.name: i for i, layer in enumerate(self.layers)}
        return [
            Record(layer=layer, layer_index=index[layer], width=self._widths[layer], metric=metric, value=value)
            for (layer, metric), value in zip(values, numbers.tolist(), strict=True)
        ]

    def to_frame(self) -> pd.DataFrame:
        """The values as a table with the columns layer, layer_index, metric and value."""
        return pd.DataFrame(self.records(), columns=["layer", "layer_index", "metric", "value"])

    def token_tables(self) -> pd.DataFrame:
        """A row for each layer and token type seen, over the rows of all ranks; every rank must call this.

        The columns are layer, layer_index, token_id, n, Q, M and V: see `embedgeo.TokenMoments.table`. Without rows
        where no metric keeps a table.
        """
        return self._of_token_types(TokenMoments.table, ("Q", "M", "V"))

    def token_planes(self) -> pd.DataFrame:
        """The most frequent token types at each layer in the plane, over the rows of all ranks; likewise.

        The columns are layer, layer_index, token_id (-1: the origin), n, pc1 and pc2: see
        `embedgeo.TokenMoments.plane`.
        """
        return self._of_token_types(TokenMoments.plane, ("pc1", "pc2"))

    def _of_token_types(
        self, what: Callable[[TokenMoments], dict[str, Tensor]], columns: Sequence[str]
    ) -> pd.DataFrame:
        self._match_ranks()
        tables = [pd.DataFrame(columns=["layer", "layer_index", "token_id", "n", *columns])]
        for i, layer in enumerate(self.layers):
            for metric in self._metrics.get(layer.name, []):
                if isinstance(metric, TokenMoments):
                    with _over_ranks(metric):
                        table = {name: column.cpu().numpy() for name, column in what(metric).items()}
                    tables.append(pd.DataFrame({"layer": layer.name, "layer_index": i, **table}))
        return pd.concat(tables[1:] or tables, ignore_index=True)

    def reset(self) -> None:
        """Forget the rows seen so far, and free the memory they took."""
        for metrics in self._metrics.values():
            for metric in metrics:
                metric.reset()  # metrics hold themselves in a cycle: the garbage collector would be late
        self._metrics.clear()
        self._widths.clear()
        self.probe.num_fired = dict.fromkeys(self.probe.num_fired, 0)

    def switch_off(self) -> None:
        """Drop the rows seen, and take no more; what ranks do together in a forward pass goes on."""
        self._is_off = True
        self.reset()

    def silent_layers(self) -> list[str]:
        """Names of the layers that no forward pass has reached in this process."""
        return [name for name, count in self.probe.num_fired.items() if not count]

    def _update(self, layer: Layer, hidden: Tensor, token_ids: Tensor | None, mask: Tensor | None) -> None:
        if isinstance(hidden, DTensor):
            hidden = hidden.full_tensor()
        if self._is_off:
            return
        hidden, token_ids, mask = pool_tokens(hidden, token_ids, mask, self._row_unit)
        metrics = self._metrics.get(layer.name)
        if metrics is None:
            metrics = self._add_metrics(layer.name, hidden.shape[-1])
        if mask is not None:
            mask = mask.to(hidden.device)
            token_ids = None if token_ids is None else token_ids.to(hidden.device)[mask]
            hidden = hidden[mask]
        for metric in metrics:
            metric.update(hidden, token_ids=token_ids)

    def _add_metrics(self, layer_name: str, dim: int) -> list[Metric]:
        metrics = [metric.to(self._device) for metric in self._make_metrics(dim)]
        for metric in metrics:
            metric._to_sync = False  # `compute` here does that
            metric.process_group = self._group
        self._metrics[layer_name], self._widths[layer_name] = metrics, dim
        return metrics

    def _match_ranks(self) -> None:
        """Give this rank the metrics of layers that only other ranks have reached, without rows."""
        widths = [self._widths.get(layer.name, 0) for layer in self.layers]
        if is_distributed():
            widths = all_reduce_max(torch.tensor(widths, device=self._device), self._group).tolist()
        for layer, dim in zip(self.layers, widths, strict=True):
            if dim and layer.name not in self._metrics:
                for metric in self._add_metrics(layer.name, dim):
                    metric.update(*_no_rows(dim, self._device))

    def _require_repeated_rows(self, names: list[tuple[str, str]], numbers: Tensor) -> None:
        """Ranks outside the group must have come to the same values, or they do not repeat the same rows."""
        finite = numbers.nan_to_num()
        largest = all_reduce_max(torch.stack((finite, -finite)))
        differs = largest.sum(0) > 1e-3 * largest.abs().amax(0)
        if bool(differs.any()):
            layer, key = names[int(differs.nonzero()[0])]
            raise ValueError(
                f"ranks that run one model in parallel must see the same rows at a layer; {key} at layer {layer!r} "
                "differs between them: its hidden state is in parts, one on each rank. Leave the layer out."
            )

    def _require_distinct_keys(self) -> None:
        owners: dict[str, str] = {}
        for metric in self._make_metrics(2):
            if not isinstance(metric, Metric):
                raise TypeError(f"metrics must make torchmetrics metrics; got {type(metric).__name__}.")
            metric.update(*_no_rows(2))
            metric._to_sync = False
            name = type(metric).__name__
            for key in metric.compute():
                if key in owners:
                    raise ValueError(
                        f"metrics must have distinct keys; {owners[key]} and {name} both give {key!r}. Leave one out."
                    )
                owners[key] = name


@contextmanager
def _over_ranks(metric: Metric) -> Iterator[None]:
    """The metric with the states of all ranks."""
    metric.sync()
    try:
        yield
    finally:
        if metric._is_synced:
            metric.unsync()


def _no_rows(dim: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    return torch.zeros(0, dim, device=device), torch.zeros(0, dtype=torch.int64, device=device)


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
        layers: ``"blocks"``, patterns of module names, a list of these or a callable on the model: see
            `embedgeo.capture.layers.resolve_layers`.
        metrics: makes the metrics of a layer, given its width; default: `embedgeo.default_metrics`.
        skip_first_positions: leave out this many real positions at the start of every sequence.
        ignore_token_ids: leave out these token ids.
        rows: ``"tokens"``, or sequences: ``"mean"``, ``"first"`` or ``"last"`` of their tokens that count. Means have
            no token ids: what needs these is absent.

    Yields:
        A `Geometry`: ``compute()`` gives ``{layer: {metric: float}}``, ``to_frame()`` a table.

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
    silent = geometry.silent_layers()
    if silent:
        warnings.warn(
            f"No forward pass reached {', '.join(silent)}: nothing was measured there. Run the model inside the "
            "with statement, by calling the modules rather than their forward().",
            stacklevel=3,
        )
