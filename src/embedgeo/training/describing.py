"""Find out what a monitor would do on a model, before a run of days starts."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embedgeo.capture.inspection import Seen, inspect_forward, named_rows
from embedgeo.capture.layers import Layer
from embedgeo.capture.states import kept_buffers, kept_modes, kept_random_states
from embedgeo.capture.structure import is_compiled, measured_model, model_width, weights_device
from embedgeo.geometry import Geometry
from embedgeo.geometry.widths import choices
from embedgeo.metrics.auto import is_auto, metric_name
from embedgeo.results.wording import listed, reason, size
from embedgeo.training.costs import Rows, drift_seconds, estimated_seconds, held_bytes
from embedgeo.training.description import DescribedLayer, DescribedMetric, Description

if TYPE_CHECKING:
    from embedgeo.training.monitor import Monitor


def describe(
    monitor: "Monitor", model: nn.Module, batch: Any = None, *, batch_size: int = 8, seq_len: int = 512
) -> Description:
    """What a monitor would do on a model: layers, sources, bytes, seconds, and what to change before training starts.

    The model is run on 2 sequences of 8 token ids, or on ``batch``, without gradients and in eval mode, and metrics are
    timed on random rows; modes, buffers and random states are afterwards what they were. A model on the meta device can
    be described, too. Call it on a model that is not yet sharded over ranks.

    Args:
        monitor: any of the monitors.
        model: as it is given to the trainer.
        batch: one to run the model on, where it does not take token ids alone: given by keyword if it is a mapping.
            Its shape is then that of training batches.
        batch_size: sequences in the batches of one optimizer step on one rank; of a probe that has its own, that.
        seq_len: tokens in a sequence; of a probe that is a list of batches, theirs.

    Raises:
        ValueError: ``batch_size`` or ``seq_len`` is not positive.
    """
    if batch_size < 1 or seq_len < 1:
        raise ValueError(f"batch_size and seq_len must be positive; got {batch_size} and {seq_len}.")
    with kept_random_states(), kept_modes(model), kept_buffers(model):
        model.eval()
        inner = measured_model(model)
        num_parameters = sum(weight.numel() for weight in inner.parameters())
        about: dict[str, Any] = {"model": type(inner).__name__, "num_parameters": num_parameters}
        try:
            geometry = monitor._make_geometry(model)
        except ValueError as error:
            found = {**about, "layers": (), "token_ids": "unknown", "mask": "unknown", "num_rows": 0, "num_types": 0}
            found |= {"rows": "unknown", "metrics": (), "state_bytes": 0, "seconds": None}
            return Description(**found, warnings=(_unresolved(model, error),))
        seen = inspect_forward(geometry.model, geometry.layers, geometry._inputs, batch)
        shape = _shape(batch) or (batch_size, seq_len)
        return _Run(monitor, model, geometry, seen, *shape, has_batch=batch is not None).description(about)


class _Run:
    """A measurement that a monitor would make: so many sequences of so many positions at each of the window's steps."""

    def __init__(
        self,
        monitor: "Monitor",
        model: nn.Module,
        geometry: Geometry,
        seen: Seen,
        batch_size: int,
        seq_len: int,
        *,
        has_batch: bool,
    ) -> None:
        self._tried = "this batch" if has_batch else "synthetic token ids"
        self._monitor, self._model, self._geometry, self._seen = monitor, model, geometry, seen
        self._make, unit = geometry.make_metrics, geometry.settings["rows"]
        probe: Any = monitor.probe
        num_batches = monitor.schedule.window if probe is None else getattr(probe, "__len__", lambda: 1)()
        if probe is not None:
            batch_size, seq_len = _shape_of_first(probe) or (getattr(probe, "batch_size", None) or batch_size, seq_len)
        length, by = (seq_len, f" × {seq_len} tokens") if unit in ("tokens", "words") else (1, f", by {unit}")
        self._by = f"{num_batches} × {batch_size} sequences{by}"
        num_sequences = num_batches * batch_size
        has_ids = bool(seen.token_ids or monitor.token_ids) and unit not in ("mean", "max")
        num_types = min(num_sequences * length, geometry._inputs.num_token_types) if has_ids else 0
        itemsize = 8 if seen.dtype == torch.float64 else 4
        self._rows = Rows(num_sequences, length, num_types, geometry.settings["jackknife"], itemsize)
        guess = model_width(geometry.model) if seen.error is not None else None
        shapes = seen.hidden
        self._widths = {each.name: shapes[each.name][-1] if each.name in shapes else guess for each in geometry.layers}

    def description(self, about: Mapping[str, Any]) -> Description:
        """All of it."""
        widths = Counter(width for width in self._widths.values() if width is not None)
        bytes_of = {width: self._bytes(width) for width in widths}
        totals: dict[str, DescribedMetric] = {}
        for width, count in sorted(widths.items()):
            for name, num_bytes in bytes_of[width].items():
                before = totals.get(name, DescribedMetric(name, 0, 0, 0))
                total = before.total_bytes + count * num_bytes
                totals[name] = DescribedMetric(name, before.num_layers + count, num_bytes, total)
        return Description(
            **about,
            layers=tuple(self._layer(layer, bytes_of) for layer in self._geometry.layers),
            token_ids=self._token_ids(),
            mask=self._mask(),
            num_rows=self._rows.total,
            num_types=self._rows.num_types,
            rows=self._by,
            metrics=tuple(totals.values()),
            state_bytes=sum(metric.total_bytes for metric in totals.values()),
            seconds=sum(count * self._seconds(width) for width, count in widths.items()) if widths else None,
            warnings=tuple(self._warnings(bytes_of)),
        )

    def _layer(self, layer: Layer, bytes_of: Mapping[int, Mapping[str, int]]) -> DescribedLayer:
        modules = [call.module for call in layer.calls]
        path = ", ".join(dict.fromkeys(map(self._path, modules)))
        start = "input of " if layer.takes_input else "mean of " if len(modules) > 1 else ""
        width = self._widths[layer.name]
        held = None if width is None else sum(bytes_of[width].values())
        return DescribedLayer(layer.name, f"{start}{path}", type(modules[0]).__name__, width, held)

    def _path(self, module: nn.Module) -> str:
        return next(name or type(module).__name__ for name, each in self._model.named_modules() if each is module)

    def _token_ids(self) -> str:
        if self._monitor.token_ids is not None:
            return "the function given as token_ids="
        paths = dict.fromkeys(self._path(table) for table, _ in self._seen.token_ids)
        if not paths:
            return "none" if self._seen.error is None else "unknown"
        return f"what {' and '.join(paths)} {'is' if len(paths) == 1 else 'are'} called with"

    def _mask(self) -> str:
        if self._monitor.mask is not None:
            return "the function given as mask="
        found = [f"{name} of {self._path(module)}" for module, name in self._seen.masks]
        if not found and self._seen.error is not None:
            return "unknown"
        return f"{' and '.join(found)}, where given" if found else "none: every position counts"

    def _bytes(self, width: int) -> dict[str, int]:
        """What each metric of a layer of this width holds."""
        held: Counter[str] = Counter()
        for metric in self._make(width):
            held[metric_name(metric)] += held_bytes(metric, width, self._rows)
        if self._monitor.drift:  # of the first measurement, of the last one and of this one
            held["drift"] = 3 * min(self._monitor.drift, self._rows.total) * width * self._rows.itemsize
        return held

    def _seconds(self, width: int) -> float:
        """An estimate of what the metrics of a layer of this width take."""
        device = weights_device(self._model)
        num_compared = min(self._monitor.drift, self._rows.total)
        total = drift_seconds(width, num_compared, device) if num_compared else 0.0
        for i in range(len(self._make(width))):
            total += estimated_seconds(lambda dim, i=i: self._make(dim)[i], width, self._rows, device)  # type: ignore[misc]
        return total

    def _warnings(self, bytes_of: Mapping[int, Mapping[str, int]]) -> Iterator[str]:
        seen, layers = self._seen, self._geometry.layers
        reached = [layer for layer in layers if layer.name in seen.hidden]
        if seen.error is not None:
            yield (
                f"The model could not be run on {self._tried} ({reason(seen.error)}): widths and sources may be "
                "missing or guessed. Give a batch: monitor.describe(model, batch)."
            )
        elif silent := [layer.name for layer in layers if layer not in reached]:
            yield f"No forward pass reached {listed(silent)}: nothing would be measured there. Leave it out of layers=."
        if not seen.token_ids and self._monitor.token_ids is None and seen.error is None:
            yield (
                "No token ids were found: values over token types (V_W, V_B …) will be absent. Give token_ids=, a "
                "function of the batch."
            )
        elif seen.token_ids and (apart := [each.name for each in reached if not seen.fits(each)]):
            yield (
                f"The rows of {listed(apart)} are not one for each token id: the monitor would turn off there. Leave "
                "that out of layers=, or give token_ids= and mask= in the order of its rows."
            )
        for width, held in bytes_of.items():
            yield from choices(self._make, width)
            excess = sum(held.values()) - self._monitor.max_state_bytes
            for name, num_bytes in sorted(held.items(), key=lambda item: -item[1]):
                if excess > 0:
                    remedy = _FEWER if is_auto(self._make) else _REMEDIES.get(name, _FEWER)
                    yield f"{name} holds {size(num_bytes)} at each layer of width {width}. {remedy}"
                    excess -= num_bytes
        is_stable = self._monitor.compiled == "stable" and self._geometry.probe.is_prepared()
        if is_compiled(self._model) and not is_stable:
            yield "The model is compiled: a measured step runs eagerly, so it is slower; the other steps are as before."
        if getattr(getattr(self._monitor, "_stage", None), "is_part", False):
            yield "The model is one stage of a pipeline: layers and bytes are those of this stage."


_FEWER = "Measure fewer layers (layers=)."
_REMEDIES = {
    "Anisotropy": "Its scatter is d × d: Anisotropy(dim, sketch=512) has none; or measure fewer layers (layers=).",
    "TokenMoments": (
        "Its table has a row for each token type: metrics=embedgeo.streaming_metrics has none, nor has "
        'metrics="auto" where it is too large; or measure fewer layers (layers=).'
    ),
}


def _unresolved(model: nn.Module, error: ValueError) -> str:
    """Why no layers were found, and which can be given instead."""
    try:
        names = named_rows(model)
    except Exception:  # of what could only have been a suggestion
        names = []
    remedy = f" These modules give a row for each token: layers={names!r}." if names else ""
    return f"{' '.join(str(error).split())}{remedy}"


def _shape(batch: Any) -> tuple[int, int] | None:
    """Sequences and tokens of a batch: the shape of its first matrix of integers, if it has one."""
    values = batch.values() if hasattr(batch, "values") and not isinstance(batch, Tensor) else [batch]
    integers = (each for each in values if isinstance(each, Tensor) and not each.is_floating_point())
    return next(((len(each), each.shape[1]) for each in integers if each.ndim == 2), None)


def _shape_of_first(probe: Any) -> tuple[int, int] | None:
    """That of the first of a list of batches."""
    return _shape(probe[0]) if isinstance(probe, Sequence) and probe else None
