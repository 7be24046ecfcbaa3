"""The geometry of one model over the probe text, and its loss there."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torchmetrics import Metric

from embedgeo.capture.structure import measured_model, weights_device
from embedgeo.checkpoints.loading import LoadedModel
from embedgeo.geometry import Geometry
from embedgeo.geometry.tables import of_token_types
from embedgeo.metrics import TokenMoments, TokenOccurrences
from embedgeo.metrics.layer import MetricFactory
from embedgeo.results.samples import LayerSample
from embedgeo.results.schema import Record, model_record
from embedgeo.sweep.loss import TokenLoss
from embedgeo.sweep.memory import release_memory
from embedgeo.sweep.metrics import metric_factory
from embedgeo.sweep.probe_text import ProbeText
from embedgeo.sweep.processes import all_agree
from embedgeo.sweep.settings import SweepSettings


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
    tables["distances"] = of_token_types("token_tables", geometry._reached(), TokenMoments.distances, ["distance"])
    if text.shown_types:
        shown = "token_tables", geometry._reached(), TokenOccurrences.plane, ["pc1", "pc2"], TokenOccurrences
        tables["occurrences"] = of_token_types(*shown).merge(types[["layer", "token_id", "n"]])
    spelled = {kind: table.assign(token=table["token_id"].map(text.token_texts)) for kind, table in tables.items()}
    return Measured(records, spelled | of_layers, about, sample)


def _with_occurrences(make: MetricFactory, token_types: Sequence[int], dim: int) -> list[Metric]:
    return [*make(dim), TokenOccurrences(dim, token_types)]
