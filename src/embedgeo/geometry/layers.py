"""The metrics of each layer of a model, updated by its forward passes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from embedgeo.capture.forward_inputs import ForwardInputs, Given
from embedgeo.capture.layers import Layer, LayerSpec, resolve_layers
from embedgeo.capture.norms import Norms
from embedgeo.capture.probe import Probe
from embedgeo.capture.rows import Aligned
from embedgeo.capture.structure import Part, weights_device
from embedgeo.functional.distributed import all_reduce_max, is_distributed
from embedgeo.functional.precision import state_device
from embedgeo.functional.rows import RowUnit, require_row_unit, require_word_ids
from embedgeo.geometry import saving
from embedgeo.geometry.computing import Computed, HandedOver, Reached, computed, computing
from embedgeo.geometry.display import why_silent
from embedgeo.geometry.drift import Drift
from embedgeo.geometry.pooling import pooled
from embedgeo.geometry.results import Results
from embedgeo.geometry.unembedding import Unembedding
from embedgeo.metrics import MAX_STATE_BYTES
from embedgeo.metrics.auto import for_token_types, metric_factory
from embedgeo.metrics.checks import require_distinct_keys
from embedgeo.metrics.layer import LayerMetrics, MetricFactory, require_num_groups
from embedgeo.results.schema import Record


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
        token_ids: Given | None = None,
        mask: Given | None = None,
        word_ids: Given | None = None,
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

    def _update(self, layer: Layer, hidden: Tensor, rows: Aligned) -> None:
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
