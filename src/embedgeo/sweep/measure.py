"""The geometry of one model over the probe text, and its loss there."""

import ctypes
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import Parameter, signature
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torchmetrics import Metric
from transformers import PreTrainedModel

from embedgeo.capture.structure import measured_model, weights_device
from embedgeo.checkpoints.loading import LoadedModel, import_named, num_token_types
from embedgeo.formatting import listed, reason
from embedgeo.geometry import Geometry
from embedgeo.geometry.export import tables_of_types
from embedgeo.metrics import TokenMoments, TokenOccurrences, auto_metrics
from embedgeo.metrics.defaults import require_distinct_keys, require_extra_names, require_samples
from embedgeo.metrics.layer import MetricFactory
from embedgeo.results.records import Record, model_record
from embedgeo.results.samples import LayerSample
from embedgeo.sweep.processes import all_agree
from embedgeo.sweep.settings import SweepSettings
from embedgeo.sweep.texts import ProbeText

_OPTIONS = (
    *("count_range", "spectrum", "discard_fraction", "id_batches", "anisotropy_batch", "after_processing"),
    *("max_state_bytes", "extra"),
)
"""Settings that are arguments of what makes the metrics, if they are not at their defaults."""


def metric_factory(settings: SweepSettings) -> MetricFactory:
    """What makes the metrics of a layer, given its width: the function named by ``metrics``, with its options.

    ``auto`` is `embedgeo.auto_metrics`.

    Raises:
        ValueError: there is no such function, it does not take one of the options, or it does not make metrics.
    """
    name = settings.metrics
    try:
        function: Any = auto_metrics if name == "auto" else import_named(name)
        if not callable(function):
            raise TypeError(f"it is a {type(function).__name__}")
    except (Exception, SystemExit) as error:
        raise ValueError(
            "metrics must name a function of a layer's width as package.function, in a module that can be imported; "
            f"got {name!r} ({reason(error)})."
        ) from error
    given = _given(settings)
    if function is auto_metrics and settings.jackknife:
        given["jackknife"] = settings.jackknife
    if refused := [option for option in given if not _takes(function, option)]:
        raise ValueError(
            f"metrics must name a function that takes the options given with it; {name} does not take "
            f"{listed(refused)}. Leave that out, or name a function that takes it."
        )
    make = partial(function, **given)
    try:
        require_distinct_keys(make)
    except (Exception, SystemExit) as error:
        if str(getattr(function, "__module__", "")).startswith("embedgeo."):  # one of one's own may have other names
            require_extra_names(given.get("extra", []))
        raise ValueError(
            "metrics must name a function that makes a list of torchmetrics metrics, of distinct keys, for any width; "
            f"{name} fails for width 2 ({reason(error)})."
        ) from error
    if settings.token_tables and not any(isinstance(metric, TokenMoments) for metric in make(2)):
        raise ValueError(f"token_tables needs metrics that hold TokenMoments; {name} makes none. Leave it out.")
    if settings.save_samples:
        require_samples(make)
    return make


def _given(settings: SweepSettings) -> dict[str, Any]:
    """The options that are not at their defaults: those of a function may be others."""
    defaults = {field.name: field.default for field in fields(settings)}
    values = {option: getattr(settings, option) for option in _OPTIONS}
    values |= {"count_range": tuple(settings.count_range), "extra": tuple(settings.extra_names)}
    return {option: value for option, value in values.items() if value != defaults[option]}


def _takes(function: Any, option: str) -> bool:
    parameters = signature(function).parameters
    return option in parameters or any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())


_POSITIONS, _TOKEN_TYPES = 1024, 2048
"""Logits are computed of so many token types at so many positions at a time, which the processor's cache holds."""
_POSITIONS_OF_ALL_TYPES = 128
"""Likewise, where the head gives the logits of all token types at once."""


class TokenLoss:
    """Runs a model over batches, and sums its loss at next tokens or, for an encoder, at masked tokens.

    Args:
        loaded: the model.
        measured: modules that are measured, and so must run on all positions.
        mask_token_id: the token that replaces masked tokens; None leaves out the loss of an encoder.
    """

    def __init__(self, loaded: LoadedModel, measured: Collection[nn.Module], mask_token_id: int | None) -> None:
        self.total = torch.zeros(2, dtype=torch.float64)
        """Sum of the losses, and their number."""
        self.is_wanted = loaded.has_head and (not loaded.is_encoder or mask_token_id is not None)
        self._model = measured_model(loaded.model)
        self._is_encoder = loaded.is_encoder
        self._mask_token_id = mask_token_id
        self._measured = measured
        self._head: nn.Module | None = None
        self._is_product = False  # the head, with weights that are at hand
        self._width = None if isinstance(self._model, PreTrainedModel) else num_token_types(self._model)

    def find_head(self, token_ids: Tensor) -> None:
        """Find the module whose output is the logits, with nothing that scales or caps them, by running some tokens."""
        head = getattr(self._model, "get_output_embeddings", lambda: None)()
        if not isinstance(head, nn.Module) or any(part in self._measured for part in head.modules()):
            return
        with suppress(Exception), _shortened(head) as given:  # an error of the model shows when it is measured
            logits = _logits(self._forward(token_ids))
            if given and logits is not None and torch.equal(logits, head(given[0]).to(logits.device)):
                self._head = head
                product = F.linear(given[0][:, -1:], head.weight, head.bias)  # type: ignore[arg-type]
                self._is_product = torch.equal(product, logits)

    def run(self, token_ids: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Run a batch; returns the input of the head, or the logits if no head was found, or None without logits."""
        if self._head is None:
            return _logits(self._forward(token_ids, mask))
        with _shortened(self._head) as given:
            self._forward(token_ids, mask)
        return given[0]

    def add(self, states: Tensor | None, token_ids: Tensor, masked: Tensor | None, mask: Tensor | None = None) -> None:
        """Add the loss of a batch; there is none where a model of the user's own gives something else than logits.

        Args:
            states: returned by `run`.
            token_ids: shape (sequences, positions).
            masked: for an encoder, the tokens to compute its loss at; bool, same shape.
            mask: bool, same shape, False = padding, on the right; None where there is none.
        """
        if self._is_encoder and self.is_wanted:
            assert masked is not None
            assert self._mask_token_id is not None
            states = self.run(token_ids.masked_fill(masked, self._mask_token_id), mask)
        self.is_wanted = self.is_wanted and states is not None and states.shape[:-1] == token_ids.shape
        if self._head is None and states is not None and self._width is not None:
            self.is_wanted = self.is_wanted and states.shape[-1] == self._width
        if not self.is_wanted:
            return
        assert states is not None
        if masked is None:  # at each position the next token
            predicts = torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask
            predicts, wanted = predicts.roll(-1, 1), token_ids.roll(-1, 1)
            predicts[:, -1] = False
        else:
            predicts, wanted = masked, token_ids
        states, wanted = states.flatten(0, 1), wanted.flatten().to(states.device)
        num_positions = _POSITIONS if self._is_product else _POSITIONS_OF_ALL_TYPES
        for part in predicts.flatten().nonzero().flatten().to(states.device).split(num_positions):
            loss = cross_entropy(self._logits_of(states[part]), wanted[part])
            self.total += torch.tensor([float(loss), len(part)], dtype=torch.float64)

    def _logits_of(self, states: Tensor) -> Iterator[Tensor]:
        """The logits of consecutive token types at some positions."""
        if self._head is None:
            yield states
        elif not self._is_product:
            yield self._head(states)
        else:
            weight: Any = self._head.weight
            bias: Any = self._head.bias
            for start in range(0, len(weight), _TOKEN_TYPES):
                types = slice(start, start + _TOKEN_TYPES)
                yield F.linear(states, weight[types], None if bias is None else bias[types])

    def _forward(self, token_ids: Tensor, mask: Tensor | None = None) -> Any:
        if not isinstance(self._model, PreTrainedModel):
            return self._model(token_ids)
        given = {} if mask is None else {"attention_mask": mask.long()}
        return self._model(input_ids=token_ids, **given)


def cross_entropy(logits: Iterable[Tensor], target: Tensor) -> Tensor:
    """The cross-entropy, summed over n positions, from the logits of consecutive classes: all are never held at once.

    Infinite where a target is none of the classes.

    Args:
        logits: shape (n, C_i), any floating dtype; of the first C_1 classes, the next C_2, and so on.
        target: the class at each position, shape (n,), int64.

    >>> round(float(cross_entropy([torch.zeros(5, 3), torch.zeros(5, 1)], torch.arange(5) % 4)) / 5, 6)  # log 4
    1.386294
    """
    sums, chosen, start = [], torch.full(target.shape, -torch.inf, device=target.device), 0
    for part in logits:
        inside = (target >= start) & (target < start + part.shape[1])
        place = (target - start).clamp(0, part.shape[1] - 1)
        wide = part.float().to(target.device)
        chosen = torch.where(inside, wide.gather(1, place[:, None])[:, 0], chosen)
        sums.append(wide.logsumexp(1))
        start += part.shape[1]
    return (torch.stack(sums).cpu().double().logsumexp(0) - chosen.cpu()).sum()


def _logits(output: Any) -> Tensor | None:
    logits = getattr(output, "logits", output)
    return logits if isinstance(logits, Tensor) else None


@contextmanager
def _shortened(head: nn.Module) -> Iterator[list[Tensor]]:
    """Run the head on the last position only; yields a list that its inputs are appended to."""
    given: list[Tensor] = []

    def shorten(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        given.append(args[0])
        return (args[0][:, -1:], *args[1:])

    handle = head.register_forward_pre_hook(shorten)
    try:
        yield given
    finally:
        handle.remove()


def release_memory() -> None:
    """Give freed memory back to the system, where the C library is glibc, which keeps what lies between what is held.

    A table of token types that grows from batch to batch leaves such holes, as do the weights of a checkpoint: of a
    70-million-weight model some 200 MB, which the next checkpoint then has on top of its own.
    """
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


@dataclass
class Measured:
    """What was measured of a checkpoint.

    Attributes:
        records: of its layers and of the model.
        tables: beside the records, by kind, those that were asked for: see `embedgeo.results.parquet.TABLES`.
        about: further facts, for `SweepFolder.write`.
        sample: what is kept of the rows, by layer, if it was asked for.
    """

    records: list[Record]
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    sample: dict[str, LayerSample] | None = None


def measure(
    fabric: Fabric, loaded: LoadedModel, text: ProbeText, settings: SweepSettings, begin_next: Callable[[], None]
) -> Measured:
    """Measure a model on the probe text; every rank must call this, and returns the same.

    Args:
        fabric: the processes and their devices.
        loaded: the model, which has no weights afterwards.
        text: the probe text.
        settings: of the sweep.
        begin_next: called when the weights have gone, before the metrics are computed.

    Raises:
        ValueError: a layer that no forward pass has reached.
        RuntimeError: another rank has failed.
    """
    if settings.device_map is None:
        model = fabric.to_device(fabric.strategy.precision.convert_module(loaded.model))
    else:
        model = loaded.model  # accelerate's hooks move what enters each part
    left_out = settings.skip_first_positions, settings.ignore_token_ids
    options: dict[str, Any] = {"rows": settings.rows, "jackknife": settings.jackknife}
    with torch.inference_mode():
        geometry = Geometry(model, settings.layer_patterns, metric_factory(settings), *left_out, **options)
    if text.shown_types:
        geometry.make_metrics = partial(_with_occurrences, geometry.make_metrics, text.shown_types)
    try:
        with torch.inference_mode(), all_agree(fabric), fabric.autocast():
            loss = _run(fabric, geometry, loaded, text, settings)
        network = measured_model(model)
        num_parameters = sum(parameter.numel() for parameter in network.parameters())  # "meta" unties those tied
        about = {"model_class": type(network).__name__, "num_parameters": str(num_parameters)}
        about["architecture"] = geometry.norms.architecture(geometry.layers)
        if not text.is_even:
            about["text_lengths"] = json.dumps(Counter(text.lengths.tolist()), sort_keys=True)
        if settings.device_map is None:
            model.to("meta")  # also where others refer to it
        release_memory()
        begin_next()
        with torch.inference_mode():
            return _results(fabric, geometry, loss, text, settings, about)
    finally:
        geometry.reset()
        del geometry.probe  # it refers back to the geometry: the model would stay until the garbage collector runs
        release_memory()


def _run(
    fabric: Fabric, geometry: Geometry, loaded: LoadedModel, text: ProbeText, settings: SweepSettings
) -> TokenLoss:
    """Run the model over the batches of this rank."""
    device = weights_device(geometry.model)
    measured = [call.module for layer in geometry.layers for call in layer.calls]
    loss = TokenLoss(loaded, measured, text.mask_token_id)
    loss.find_head(text.token_ids[: min(8, int(text.lengths[0]))].view(1, -1).to(device))
    for on_cpu in text.batches(settings.batch_size, fabric.global_rank, fabric.world_size):
        batch = move_data_to_device(on_cpu, device)
        if batch.word_ids is not None:
            geometry.probe.word_ids, geometry.probe.token_ids = batch.word_ids, batch.word_types
        with geometry.probe:
            states = loss.run(batch.token_ids, batch.mask)
        loss.add(states, batch.token_ids, batch.masked, batch.mask)
        del states  # they may be the logits of the whole batch, and the next ones are made in their place
    return loss


def _results(
    fabric: Fabric, geometry: Geometry, loss: TokenLoss, text: ProbeText, settings: SweepSettings, about: dict[str, str]
) -> Measured:
    records = geometry.records()
    if silent := geometry.silent_layers():
        raise ValueError(f"layers must be reached by a forward pass; {', '.join(silent)} never was. Leave it out.")
    sums = fabric.all_reduce(loss.total.to(fabric.device), reduce_op="sum")
    assert isinstance(sums, Tensor)
    total, count = sums.tolist()
    if loss.is_wanted and count:
        records.append(model_record("loss", total / count))
    sample = geometry.samples() if settings.save_samples else None
    of_layers = geometry.layer_tables()
    if not settings.token_tables:
        return Measured(records, of_layers, about, sample)
    types = geometry.token_tables()
    tables = {"tokens": types.assign(num_tokens=types["token_id"].map(text.type_sizes) if text.words else 1.0)}
    tables["projections"] = geometry.token_planes()
    tables["distances"] = tables_of_types(
        "token_tables", geometry.measured_layers(), TokenMoments.distances, ["distance"]
    )
    if text.shown_types:
        shown = "token_tables", geometry.measured_layers(), TokenOccurrences.plane, ["pc1", "pc2"], TokenOccurrences
        tables["occurrences"] = tables_of_types(*shown).merge(types[["layer", "token_id", "n"]])
    spelled = {kind: table.assign(token=table["token_id"].map(text.token_texts)) for kind, table in tables.items()}
    return Measured(records, spelled | of_layers, about, sample)


def _with_occurrences(make: MetricFactory, token_types: Sequence[int], dim: int) -> list[Metric]:
    return [*make(dim), TokenOccurrences(dim, token_types)]
