"""The metrics of all layers of a model, updated by its forward passes, and their results."""

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from embedgeo.capture.forward_inputs import ForwardInputs, PerToken, RowTokens
from embedgeo.capture.layers import Layer, LayerSpec, resolve_layers
from embedgeo.capture.norms import Norms
from embedgeo.capture.probe import Probe
from embedgeo.capture.structure import Part, measured_model, weights_device
from embedgeo.extras import require_extra
from embedgeo.formatting import measured, reason
from embedgeo.functional.distributed import all_reduce_max, has_other_ranks, is_distributed
from embedgeo.functional.precision import state_device
from embedgeo.functional.rows import RowUnit, find_words, pool_tokens, require_row_unit, require_word_ids, row_ids
from embedgeo.geometry import saving
from embedgeo.geometry.computing import Computed, HandedOver, Reached, computed, computing
from embedgeo.geometry.drift import Drift
from embedgeo.glossary import HEADLINES, in_order, term
from embedgeo.metrics import MAX_STATE_BYTES, Anisotropy, NextTokenGeometry, OutlierCoordinates, TokenMoments
from embedgeo.metrics.defaults import (
    for_token_types,
    metric_factory,
    require_distinct_keys,
    require_samples,
)
from embedgeo.metrics.layer import LayerMetrics, MetricFactory, require_num_groups
from embedgeo.results.records import Record
from embedgeo.results.samples import LayerSample

if TYPE_CHECKING:
    import pandas as pd


def pooled(
    hidden: Tensor,
    tokens: RowTokens,
    sequence_ids: Callable[[torch.Size], Tensor],
    unit: RowUnit,
    *,
    has_word_types: bool,
) -> tuple[Tensor, dict[str, Any]]:
    """The rows of a layer, each a token, a sequence or a word.

    What depends on the ids of tokens or words alone is made once for all layers of a forward pass.

    Args:
        hidden: shape (..., d).
        tokens: what is known of each position.
        sequence_ids: the sequence of each row, given their shape.
        unit: what a row is.
        has_word_types: whether the token ids are the types of the words.

    Returns:
        Hidden states, and the other arguments of `LayerMetrics.update`.

    Raises:
        ValueError: hidden states that cannot be pooled, or no word ids.
    """
    shape, device = hidden.shape[:-1], hidden.device
    if unit == "tokens":
        given = tokens.token_ids, tokens.mask
        return hidden, {"ids": tokens.prepared_once(device, lambda: row_ids(hidden, *given, sequence_ids(shape)))}
    if unit != "words":
        rows, token_ids, mask = pool_tokens(hidden, tokens.token_ids, tokens.mask, unit)
        return rows, {"token_ids": token_ids, "mask": mask}
    word_ids = tokens.word_ids
    require_word_ids("words", word_ids)
    assert word_ids is not None
    ids = {"types" if has_word_types else "token_ids": tokens.token_ids, "mask": tokens.mask}
    words = tokens.prepared_once(device, lambda: find_words(device, word_ids, sequence_ids(shape), **ids))
    return words.means(hidden), {"ids": words.ids}


class Unembedding:
    """The weights of a model's output embedding, held where a metric asks for them, also when the model's are gone.

    Args:
        model: any module; a model of transformers, or another one with ``get_output_embeddings()``, has them.
        make_metrics: makes the metrics of a layer.
    """

    def __init__(self, model: nn.Module, make_metrics: MetricFactory) -> None:
        self._weights: Tensor | None = None
        if any(isinstance(metric, NextTokenGeometry) for metric in make_metrics(2)):
            head = getattr(measured_model(model), "get_output_embeddings", lambda: None)()
            weights = getattr(head, "weight", None)
            if isinstance(weights, Tensor) and weights.is_floating_point() and not weights.is_meta:
                self._weights = weights

    def give(self, layers: Iterable[LayerMetrics], *, copied: bool) -> None:
        """Give the metrics the weights as they are now; every rank must call this, as each may have a part of them.

        Args:
            layers: the metrics of all layers.
            copied: whether the weights may change before the metrics are computed.
        """
        if self._weights is None:
            return
        weights = self._weights.detach()
        if isinstance(weights, DTensor):
            weights = weights.full_tensor()
        elif copied:
            weights = weights.clone()
        for metrics in layers:
            metrics.set_unembedding(weights)


def of_records(records: Sequence[Record]) -> "pd.DataFrame":
    """See `embedgeo.Geometry.to_frame`."""
    require_extra("report", "Geometry.to_frame", "pandas")
    import pandas as pd

    return pd.DataFrame(records, columns=["layer", "layer_index", "metric", "value", "stderr"])


def of_token_types(
    method: str,
    reached: Iterable[Reached],
    of: Callable[[Any], dict[str, Tensor]],
    columns: Sequence[str],
    kind: type = TokenMoments,
) -> "pd.DataFrame":
    """See `embedgeo.Geometry.token_tables` and ``token_planes``.

    Args:
        method: of `embedgeo.Geometry`, as it was called.
        reached: the layers that have rows.
        of: a method that gives the columns of a layer.
        columns: its columns, for an empty table.
        kind: of metric that it is a method of.
    """
    require_extra("report", f"Geometry.{method}", "pandas")
    import pandas as pd

    tables = [pd.DataFrame(columns=["layer", "layer_index", "token_id", "n", *columns])]
    for each in reached:
        for metric in each.metrics.synced(kind):
            table = {name: column.cpu().numpy() for name, column in of(metric).items()}
            tables.append(pd.DataFrame({"layer": each.layer.name, "layer_index": each.layer_index, **table}))
    return pd.concat(tables[1:] or tables, ignore_index=True)


def of_layers(reached: Iterable[Reached]) -> "dict[str, pd.DataFrame]":
    """See `embedgeo.Geometry.layer_tables`; without those that are empty."""
    require_extra("report", "Geometry.layer_tables", "pandas")
    import pandas as pd

    found: dict[str, list[pd.DataFrame]] = {}
    for each in reached:
        at = {"layer": each.layer.name, "layer_index": each.layer_index}
        for spectral in each.metrics.synced(Anisotropy, having="spectrum"):
            index = range(1, spectral.dim + 1)
            columns = {"index": index, "eigenvalue": spectral.eigenvalues().cpu().numpy(), "n": int(spectral.num_rows)}
            found.setdefault("spectra", []).append(pd.DataFrame({**at, **columns}))
        for metric in each.metrics.synced(OutlierCoordinates):
            columns = {name: column.cpu().numpy() for name, column in metric.largest_coordinates().items()}
            found.setdefault("coordinates", []).append(pd.DataFrame({**at, **columns}))
    return {kind: pd.concat(tables, ignore_index=True) for kind, tables in found.items()}


_MOST = 8
"""Columns where none of the metrics is among those to look at first."""


def html_table(geometry: "Results") -> str:
    """A row for each layer and a column for each metric to look at first, with standard errors where there are any.

    An undefined value is a dash. It never raises, and calls on no other process: where there are several, or nothing
    was measured yet, it is a sentence.
    """
    try:
        return _table(geometry)
    except Exception as error:  # a notebook would print the whole traceback
        return f"<p>Geometry: it cannot be computed ({escape(reason(error))}).</p>"


def why_silent(geometry: "Geometry") -> str:
    """See `Geometry.why_silent`."""
    silent = geometry.silent_layers()
    if not silent:
        return ""
    if geometry.probe.layers_without_gradients.issuperset(silent):
        return f"only forward passes without gradients reached {', '.join(silent)}: count them by no_grad_passes=True."
    if geometry.probe.is_stable:
        return f"no forward pass reached {', '.join(silent)}, at least in no graph compiled after prepare(model)."
    return f"no forward pass reached {', '.join(silent)}."


def _table(geometry: "Results") -> str:
    start = f"Geometry of {len(geometry.layers)} layers"
    if has_other_ranks():
        return f"<p>{start}, on several ranks: <code>to_frame()</code>, called on every rank, has the numbers.</p>"
    records = geometry.records()
    if not records:
        return f"<p>{start}: nothing was measured yet.</p>"
    found = in_order(record["metric"] for record in records)
    shown = [metric for metric in HEADLINES if metric in found] or found[:_MOST]
    cells: dict[str, dict[str, str]] = {}
    for record in records:
        is_defined = record["value"] == record["value"]
        text = measured(record["value"], record["stderr"]) if is_defined else "–"
        cells.setdefault(record["layer"], {})[record["metric"]] = text
    titles = "".join(f'<th title="{escape(term(key).meaning)}">{escape(term(key).name)}</th>' for key in shown)
    rows = "".join(
        f"<tr><th>{escape(layer)}</th>" + "".join(f"<td>{of_layer.get(key, '–')}</td>" for key in shown) + "</tr>\n"
        for layer, of_layer in cells.items()
    )
    more = f"{len(found) - len(shown)} more metrics: <code>to_frame()</code>. " if len(found) > len(shown) else ""
    why = geometry.why_silent()
    caption = f"{start}. {more}{escape(why[:1].upper() + why[1:])}".strip()
    return f"<table>\n<caption>{caption}</caption>\n<tr><th>layer</th>{titles}</tr>\n{rows}</table>"


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
        return of_records(self.records())

    _repr_html_ = html_table

    def token_tables(self) -> "pd.DataFrame":
        """`embedgeo.TokenMoments.table` of every layer; empty if no metric has one. Every rank must call this."""
        return of_token_types("token_tables", self._reached(), TokenMoments.table, ("Q", "M", "V"))

    def token_planes(self) -> "pd.DataFrame":
        """`embedgeo.TokenMoments.plane` of every layer; empty if no metric has one. Every rank must call this."""
        return of_token_types("token_planes", self._reached(), TokenMoments.plane, ("pc1", "pc2"))

    def layer_tables(self) -> "dict[str, pd.DataFrame]":
        """All eigenvalues (``spectra``) and the largest ``coordinates``, where metrics have them; for every rank."""
        return of_layers(self._reached())

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


class Geometry(Results):
    """Metrics for each layer of a model, updated by the forward passes that run while ``probe`` is attached.

    Args:
        model: any module. It and the arguments up to ``max_state_bytes`` are those of `observe`.
        on_error: called with an exception raised in a hook, to which a note with the layer is added; default: raised.
        device: the device on which ranks exchange values; default: that of the parameters.
        process_group: the ranks that have different rows; others repeat theirs (tensor parallelism). Default: all.
        sequence_mesh: the ranks of which each may have a part of the positions (sequence parallelism).
        part: the blocks that the model has, if it is a stage of a pipeline.
        stage_group: the ranks that have this stage. Default: all ranks have the same layers.
        drift: compares the rows with those of other layers, and with those that it was given before.

    Attributes:
        layers: of the model, in forward order.
        make_metrics: makes the metrics of a layer, given its width.
        probe: attaches the hooks, as a context manager.
        norms: whose outputs layers are.
        part: the blocks that the model has, if it is a stage of a pipeline.
        settings: what the results depend on beside model and data, as `save` records it.

    Raises:
        TypeError, ValueError: a bad argument, layers that are not found, or two metrics with the same key.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: LayerSpec = "blocks",
        metrics: MetricFactory | Literal["auto"] | None = None,
        skip_first_positions: int = 0,
        ignore_token_ids: Sequence[int] = (),
        *,
        rows: RowUnit = "tokens",
        token_ids: PerToken | None = None,
        mask: PerToken | None = None,
        word_ids: PerToken | None = None,
        no_grad_passes: bool = True,
        jackknife: int = 0,
        max_state_bytes: float = MAX_STATE_BYTES,
        on_error: Callable[[Exception], None] | None = None,
        device: torch.device | None = None,
        process_group: dist.ProcessGroup | None = None,
        sequence_mesh: DeviceMesh | None = None,
        part: Part | None = None,
        stage_group: dist.ProcessGroup | None = None,
        drift: Drift | None = None,
    ) -> None:
        require_row_unit(rows)
        require_num_groups(jackknife)
        if word_ids is not None:  # they may be given to the probe later, too
            require_word_ids(rows, word_ids)
        self.settings: dict[str, Any] = {"layers": saving.described_layers(layers), "rows": rows}
        if callable(layers) and isinstance(inner := layers(model), nn.Module):
            model, layers = inner, "blocks"
        self.model = model
        self.layers = resolve_layers(model, layers, part)
        self.part = part
        self._inputs = ForwardInputs(model, skip_first_positions, ignore_token_ids)
        self.settings |= {"skip_first_positions": skip_first_positions, "ignore_token_ids": list(ignore_token_ids)}
        self.probe = Probe(self.layers, self._inputs, self._update, on_error, no_grad_passes=no_grad_passes)
        self.probe.token_ids, self.probe.mask, self.probe.word_ids = token_ids, mask, word_ids
        self.probe.sequence_mesh = sequence_mesh
        make = metric_factory(metrics, max_state_bytes=max_state_bytes, jackknife=jackknife)
        self.make_metrics = make if rows == "words" else for_token_types(make, self._inputs.num_token_types)
        require_distinct_keys(self.make_metrics)
        self._unembedding = Unembedding(model, self.make_metrics)
        self.settings |= {"metrics": saving.described_metrics(self.make_metrics), "jackknife": jackknife}
        self._device = state_device(device or weights_device(model))
        self._group, self._stage_group, self._drift, self._is_off = process_group, stage_group, drift, False
        self._metrics, self.norms = dict[str, LayerMetrics](), Norms(model, rows)

    def records(self) -> list[Record]:
        """A record for each metric at each layer, over the rows of all ranks; every rank must call this.

        Layers that no forward pass has reached, on any rank, are left out.
        """
        return self.agreed(computed(self._compared))

    def hand_over(self) -> HandedOver:
        """Give the rows seen so far away, to a thread that computes their numbers; every rank must call this."""
        handed_over = HandedOver(computing(partial(self._compared, copied=True)), self.why_silent())
        self._metrics = {}
        self.reset()
        return handed_over

    @property
    def needs_all_ranks(self) -> bool:
        """Whether `agreed` needs all ranks at the same time."""
        return self._group is not None

    def agreed(self, computed: Computed) -> list[Record]:
        """The records of numbers, once the ranks that repeat rows agree on them.

        Raises:
            Exception: what was raised in place of numbers.
            ValueError: ranks that repeat rows have other numbers.
        """
        names = [layer.name for layer in self.layers]
        if self._group is not None:
            computed.require_same(names, self._device, self._stage_group)
        return computed.records(names)

    def silent_layers(self) -> list[str]:
        """Names of the layers without rows: no forward pass has reached them, after `records` on no rank."""
        return [layer.name for layer in self.layers if layer.name not in self._metrics]

    def why_silent(self) -> str:
        """A sentence that names the `silent_layers` and the reason; empty if there are none."""
        return why_silent(self)

    def reset(self) -> None:
        """Drop the rows seen so far and free their memory."""
        for metrics in self._metrics.values():
            metrics.reset()
        self._metrics.clear()
        self.probe.layers_without_gradients.clear()

    def switch_off(self) -> None:
        """Drop the rows seen and take no more; collectives inside forward passes are still taken part in."""
        self._is_off = True
        self.reset()

    def _update(self, layer: Layer, hidden: Tensor, rows: RowTokens) -> None:
        hidden = hidden.full_tensor() if isinstance(hidden, DTensor) else hidden
        if self._is_off:
            return
        if layer.name not in self._metrics:
            expected = self.norms.expected_size(layer, hidden, rows.mask)
            self._add_metrics(layer.name, hidden.shape[-1]).expected_Q = expected
        types, unit = self.probe.token_ids is not None, self.settings["rows"]
        hidden, given = pooled(hidden, rows, self._inputs.sequence_ids, unit, has_word_types=types)
        self._metrics[layer.name].update(hidden, **given)

    def _add_metrics(self, layer_name: str, dim: int) -> LayerMetrics:
        given = {"device": self._device, "process_group": self._group, "jackknife": self.settings["jackknife"]}
        make = self.make_metrics if self._drift is None else self._drift.with_fixed_rows(self.make_metrics)
        return self._metrics.setdefault(layer_name, LayerMetrics(make, dim, **given))

    def _compared(self, *, copied: bool = False) -> list[Reached]:
        """The layers that have rows on any rank, compared with others if they are to be."""
        reached = self._reached(copied=copied)
        return reached if self._drift is None else self._drift.compared(reached)

    def _reached(self, *, copied: bool = False) -> list[Reached]:
        """The layers that have rows on any rank, with their indices and metrics."""
        known = [(m.dim, m.expected_Q) if (m := self._metrics.get(x.name)) else (0, 0.0) for x in self.layers]
        if is_distributed():
            of_this_rank = torch.tensor(known, dtype=torch.float64, device=self._device)
            known = all_reduce_max(of_this_rank, self._stage_group).tolist()
        for layer, (dim, expected) in zip(self.layers, known, strict=True):
            if dim and layer.name not in self._metrics:  # only other ranks have reached it
                no_rows = torch.zeros(0, int(dim), device=self._device)
                self._add_metrics(layer.name, int(dim)).update(no_rows, no_rows[:, 0].long(), None, None)
            if dim:
                self._metrics[layer.name].expected_Q = expected
        self._unembedding.give(self._metrics.values(), copied=copied)
        return [Reached(i, x, self._metrics[x.name]) for i, x in enumerate(self.layers) if x.name in self._metrics]


@contextmanager
def observe(
    model: nn.Module,
    layers: LayerSpec = "blocks",
    metrics: MetricFactory | Literal["auto"] | None = None,
    skip_first_positions: int = 0,
    ignore_token_ids: Sequence[int] = (),
    rows: RowUnit = "tokens",
    *,
    token_ids: PerToken | None = None,
    mask: PerToken | None = None,
    word_ids: PerToken | None = None,
    no_grad_passes: bool = True,
    jackknife: int = 0,
    max_state_bytes: float = MAX_STATE_BYTES,
) -> Iterator[Geometry]:
    """Measure the geometry of the hidden states of the forward passes that run inside.

    Args:
        model: any module.
        layers: ``"blocks"``, ``"hidden_states"``, a pattern of names, a list of these or a callable on the model: see
            `embedgeo.capture.layers.resolve_layers`.
        metrics: makes the metrics of a layer, given the layer's width; default: `embedgeo.default_metrics`; ``"auto"``:
            those of them that ``max_state_bytes`` leaves room for, see `embedgeo.auto_metrics`.
        skip_first_positions: leave out this many real positions at the start of every sequence.
        ignore_token_ids: leave out these token ids.
        rows: what a row is: a token (``"tokens"``), or a sequence, by the ``"mean"``, the ``"max"`` (in each
            coordinate), the ``"first"`` or the ``"last"`` of its tokens that count. Means and maxima have no token ids:
            the metrics that need them are absent. Or a word (``"words"``), by the mean of its tokens that count; words
            of the same token ids are a token type. Averaging makes norms smaller, the more so the more tokens a word
            has, and rare words have more: do not compare Q, M and V of words of different lengths (Yamagiwa &
            Shimodaira 2025, appendix J).
        token_ids: the token ids, or a function that returns those of a batch; default: those that the input embedding
            is called with. The batch is what the model is called with: its only argument, as in ``model(batch)``, or
            a dict of its arguments by name, as in ``model(**batch)``.
        mask: the mask (True = count), or a function that returns that of a batch; default: the attention mask that the
            model is called with.
        word_ids: for words, the number of each token's word within its sequence, -1 for tokens of no word, or a
            function that returns those of a batch; a tokenizer's ``word_ids()`` has them. ``token_ids`` are then the
            types of the words, of which a word's first token has it; ``ignore_token_ids`` are still tokens.
        no_grad_passes: whether forward passes without gradients count; see `embedgeo.GeometryMonitor`.
        jackknife: G, the number of groups of whole sequences for standard errors (16 is a good choice), which needs
            up to G + 1 times the memory; 0: there are none.
        max_state_bytes: what the metrics of a layer may hold together with ``metrics="auto"``; else what its scatter
            may take, above which the default metrics have a sketch: see `embedgeo.default_metrics`.

    Yields:
        Geometry: its ``compute()`` returns ``{layer: {metric: float}}``, its ``to_frame()`` a table.

    Raises:
        TypeError, ValueError: as `Geometry` does.

    >>> import torch
    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    >>> with observe(model, layers="1") as geometry:
    ...     _ = model(torch.tensor([[1, 2, 3, 1]]))
    >>> geometry.compute()["01"]["n"]
    4.0
    """
    options: dict[str, Any] = {"rows": rows, "token_ids": token_ids, "mask": mask, "word_ids": word_ids}
    options |= {"no_grad_passes": no_grad_passes, "jackknife": jackknife, "max_state_bytes": max_state_bytes}
    geometry = Geometry(model, layers, metrics, skip_first_positions, ignore_token_ids, **options)
    with geometry.probe:
        yield geometry
    if why := geometry.why_silent():
        warnings.warn(f"{why[0].upper()}{why[1:]} Nothing was measured there.", stacklevel=3)
