"""What the monitor needs from a trainer, and how it runs the model on held-out batches."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from embedgeo.functional.distributed import all_reduce_max, current_rank, is_distributed
from embedgeo.results.schema import Record


@dataclass(frozen=True)
class TrainerAdapter:
    """A training run, as `embedgeo.training.monitor.Monitor` uses it.

    Attributes:
        model: the module in which layers are found.
        device: the device of this process.
        to_device: moves a batch to the device.
        forward: runs the model on a batch of the probe.
        log: called with the step and the records measured at it.
        process_group: the ranks that have different rows; None: all ranks.
    """

    model: nn.Module
    device: torch.device
    to_device: Callable[[Any], Any]
    forward: Callable[[Any], object]
    log: Callable[[int, list[Record]], None]
    process_group: dist.ProcessGroup | None = None


def run_probe(
    probe: Iterable[Any], adapter: TrainerAdapter, attach: Callable[[Any], None], detach: Callable[[], None]
) -> None:
    """Run the model on the batches of a probe, in eval mode and without gradients.

    Each round takes one batch for each rank. Either all ranks run the model in a round or none does, because they
    gather sharded parameters together: a rank without a batch of its own repeats another one, not measured.

    Args:
        probe: the same batches on every rank.
        adapter: moves batches and runs the model.
        attach: called with a batch, on the device, before the model runs on it, if it is to be measured.
        detach: called after the model has run.

    Raises:
        Exception: an error of this rank in the probe, ``attach`` or the model.
        RuntimeError: there was an error on another rank.
        ValueError: the probe has another number of batches on another rank.
    """
    num_ranks = dist.get_world_size(adapter.process_group) if is_distributed() else 1
    rank = current_rank(adapter.process_group)
    batches = chain.from_iterable([probe])  # calls iter(probe), which may fail, in the first round
    error: Exception | None = None
    num_taken = num_ranks
    with _eval_mode(adapter.model), torch.no_grad():
        while num_taken:
            num_taken, own = 0, None
            try:
                for num_taken, batch in enumerate(islice(batches, 0 if error else num_ranks), 1):
                    if num_taken <= rank + 1:
                        own = batch
                if num_taken:
                    own = adapter.to_device(own)
                    if rank < num_taken:
                        attach(own)
            except Exception as caught:
                error = caught
            error = _agree_on_error(error, num_taken, adapter.device)
            if error is not None:
                raise error
            if num_taken:
                try:
                    adapter.forward(own)
                except Exception as caught:  # the other ranks learn of it in the next round
                    error = caught
                detach()


def _agree_on_error(error: Exception | None, num_taken: int, device: torch.device) -> Exception | None:
    """The error to raise on this rank, its own or one because of another rank; None if no rank has one."""
    if not is_distributed():
        return error
    state = torch.tensor([int(error is not None), num_taken, -num_taken], device=device)
    failed, most, least = all_reduce_max(state).tolist()
    if error is None and failed:
        return RuntimeError("it failed on another rank")
    if error is None and most != -least:
        return ValueError(
            f"probe must give the same batches on every rank, because ranks share them; one rank has {-least} left, "
            f"another one {most}. Do not shard the probe's data."
        )
    return error


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    training = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, was_training in training:
            m.training = was_training
