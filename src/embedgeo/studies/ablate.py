"""The ablation of a sweep's checkpoints: the command ``embedgeo ablate``."""

from collections.abc import Sequence
from functools import partial

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import nn

from embedgeo.capture.layers import resolve_layers
from embedgeo.capture.structure import weights_device
from embedgeo.results.records import Record
from embedgeo.studies.ablation import (
    NUM_REMOVED,
    Ablation,
    AblationBatch,
    lens_layers,
    make_batch,
    passes_line,
)
from embedgeo.studies.commands import AblationParts
from embedgeo.sweep.measure import RunningCheckpoint
from embedgeo.sweep.processes import all_agree
from embedgeo.sweep.settings import SweepSettings
from embedgeo.sweep.texts import ProbeText

SHOWN = {
    "loss": "loss",
    "loss_change_without_offset": "Δ no offset",
    "loss_change_without_1_directions": "Δ no top direction",
    "loss_change_without_context": "Δ no context",
    "loss_change_without_token": "Δ no token mean",
    "loss_change_as_noise": "Δ Gaussian rows",
    "logit_lens_loss": "logit lens",
    "unseen_type_share": "unseen types",
}
"""What is printed of a checkpoint, with headings: changes of the loss have a Δ."""


def announcement(
    model: nn.Module, settings: SweepSettings, text: ProbeText, *, parts: AblationParts
) -> str:
    """A sentence on the forward passes that the ablation of a sweep's checkpoint takes."""
    layers = resolve_layers(model, settings.layer_patterns)
    num_batches = len(text.batches(settings.batch_size))
    lines = []
    if parts != "logit_lens":
        lines.append(passes_line(len(layers), num_batches, _num_removed(settings)))
    if parts != "ablation":
        num_passes = num_batches * len(lens_layers(model, layers))
        lines.append(f"logit lens: {num_passes:,} forward passes")
    return f"for each checkpoint, {'; '.join(lines)}"


def checkpoint_records(running: RunningCheckpoint, *, parts: AblationParts) -> list[Record]:
    """The records of the ablation and of the logit lens of a sweep's checkpoint.

    The batches are those of each rank, whose sequences have the numbers of all ranks' batches;
    every rank must call this.

    Raises:
        ValueError: the model gives no logits, or there are fewer than two sequences.
    """
    settings = running.settings
    geometry = running.geometry
    text = running.text
    with all_agree(running.fabric):
        if not running.has_loss or len(text.lengths) < 2:
            raise ValueError(
                "ablate needs a model with a language model head (of a masked one, with a mask "
                "token), and at least 2 sequences; this one has "
                f"{'a' if running.has_loss else 'no'} head, and the text {len(text.lengths)}."
            )
        run = partial(
            Ablation,
            geometry.model,
            batches=_sweep_batches(running),
            num_sequences=len(text.batches(settings.batch_size)) * settings.batch_size,
            skip_first_positions=text.skip_first_positions,
            ignore_token_ids=text.ignore_token_ids,
            num_removed=_num_removed(settings),
            agree=partial(all_agree, running.fabric),
            has_ranks=running.fabric.world_size > 1,
        )
        changes = run(layers=dict(enumerate(geometry.layers))) if parts != "logit_lens" else None
        lens = (
            run(layers=lens_layers(geometry.model, geometry.layers))
            if parts != "ablation"
            else None
        )
    records: list[Record] = []
    if changes is not None:
        records += [each for each in changes.records() if each["metric"] != "loss"]
    if lens is not None:
        records += lens.lens_records()
    return records


def _num_removed(settings: SweepSettings) -> Sequence[int]:
    return settings.removed_directions or NUM_REMOVED


def _sweep_batches(running: RunningCheckpoint) -> list[AblationBatch]:
    """The batches of a sweep's text that this rank has."""
    text, batch_size = running.text, running.settings.batch_size
    rank, num_ranks = running.fabric.global_rank, running.fabric.world_size
    device = weights_device(running.geometry.model)
    batches = []
    for i, on_cpu in enumerate(text.batches(batch_size, rank, num_ranks)):
        batch = move_data_to_device(on_cpu, device)
        numbers = (i * num_ranks + rank) * batch_size + torch.arange(len(batch.token_ids))
        inputs = {"input_ids": batch.token_ids}
        if batch.mask is not None:
            inputs["attention_mask"] = batch.mask.long()
        of_text = {"masked": batch.masked, "mask_token_id": text.mask_token_id}
        batches.append(make_batch(inputs, numbers, **of_text))
    return batches
