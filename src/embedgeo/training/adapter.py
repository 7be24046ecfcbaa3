"""What the monitor needs from a trainer, and how it runs the model on batches by itself."""

import importlib
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from embedgeo.capture.calls import kept_buffers, present_modes
from embedgeo.capture.structure import is_compiled
from embedgeo.extras import require_extra
from embedgeo.formatting import reason
from embedgeo.functional.distributed import all_reduce_max, current_rank, is_distributed
from embedgeo.geometry import Geometry
from embedgeo.results.records import Record

if TYPE_CHECKING:
    from embedgeo.results.parquet import HistoryFile


@dataclass(frozen=True)
class TrainerAdapter:
    """A training run, as `embedgeo.training.monitor.Monitor` uses it.

    Attributes:
        model: the module in which layers are found.
        device: the device of this process.
        to_device: moves a batch to the device.
        forward: runs the model on a batch, of the probe or of training, outside of a training step.
        log: called with the step and the records measured at it.
        process_group: the ranks that have different rows; None: all ranks.
        writes: whether this process writes files.
        folder: where the trainer writes its results; None: nowhere.
        is_followed: whether the trainer decides by the values, so that they cannot be late.
        set_train_mode: puts the model into the mode that it has in a training step, if it can be in another one.
    """

    model: nn.Module
    device: torch.device
    to_device: Callable[[Any], Any]
    forward: Callable[[Any], object]
    log: Callable[[int, list[Record]], None]
    process_group: dist.ProcessGroup | None = None
    writes: bool = True
    folder: Path | None = None
    is_followed: bool = False
    set_train_mode: Callable[[], object] = lambda: None

    def history_file(self, folder: str | Path | None, prefix: str) -> "HistoryFile | None":
        """The file of a monitor's records, in ``folder`` or else the trainer's; None if this process writes none."""
        folder = folder or self.folder
        if not self.writes or folder is None or history_lacks():
            return None
        from embedgeo.results.parquet import HistoryFile

        return HistoryFile(Path(folder), prefix)


def history_lacks() -> str:
    """What the history file needs that is not installed, with the command that installs it; empty if nothing."""
    try:
        require_extra("report", "history.parquet", "pandas", "pyarrow")
    except ImportError as missing:
        return str(missing)
    return ""


def run_model(
    batches: Iterable[Any],
    adapter: TrainerAdapter,
    attach: Callable[[Any], None],
    detach: Callable[[], None],
    *,
    as_training: bool = False,
) -> None:
    """Run the model on batches, without gradients; weights, buffers and modes are what they were afterwards.

    Each round takes one batch for each rank. Either all ranks run the model in a round or none does, because they
    gather sharded parameters together: a rank without a batch of its own repeats another one, not measured.

    Args:
        batches: the same on every rank, which share them.
        adapter: moves batches and runs the model.
        attach: called with a batch, on the device, before the model runs on it, if it is to be measured.
        detach: called after the model has run, also where it fails.
        as_training: run the model as in a training step, dropout included, instead of in eval mode; the batches are
            those of this rank, which shares them with no other one, as they were given to it in training.

    Raises:
        Exception: an error of this rank in the batches, ``attach`` or the model.
        RuntimeError: there was an error on another rank.
        ValueError: there is another number of batches on another rank.
    """
    is_shared = is_distributed() and not as_training
    num_ranks = dist.get_world_size(adapter.process_group) if is_shared else 1
    rank = current_rank(adapter.process_group) if is_shared else 0
    rounds = chain.from_iterable([batches])  # calls iter(batches), which may fail, in the first round
    error: Exception | None = None
    num_taken = num_ranks
    with ExitStack() as kept, torch.no_grad():
        kept.callback(detach)
        kept.callback(present_modes(adapter.model))
        if as_training:
            kept.enter_context(kept_buffers(adapter.model))
            adapter.set_train_mode()
        else:
            adapter.model.eval()
        while num_taken:
            num_taken, own = 0, None
            try:
                for num_taken, batch in enumerate(islice(rounds, 0 if error else num_ranks), 1):
                    if num_taken <= rank + 1:
                        own = batch
                if num_taken:
                    if not as_training:  # a module may change a batch on its way to the device, and has done so
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


def call_inside(wrapper: nn.Module, module: nn.Module, call: Callable[[], object]) -> None:
    """Run ``call`` in place of the forward pass of ``module`` inside its wrapper, where FSDP gathers parameters."""
    forward = module.forward

    def redirected(*args: Any) -> None:
        module.forward = forward
        call()

    module.forward = redirected
    try:
        wrapper()
    finally:
        module.forward = forward


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


Compiled = Literal["eager", "stable"]
"""How a measured step of a compiled model runs."""


def require_compiled(compiled: str) -> None:
    """Raise ValueError if ``compiled`` is neither ``"eager"`` nor ``"stable"``, or the latter not for this torch."""
    if compiled not in ("eager", "stable"):
        raise ValueError(f'compiled must be "eager" or "stable"; got {compiled!r}.')
    if compiled == "stable":
        try:
            importlib.import_module("embedgeo.capture.graph_hooks")  # which takes names that torch may change
        except Exception as error:
            torch = version("torch")
            cause = f'compiled="stable" does not work with torch {torch} ({reason(error)}). Use compiled="eager".'
            raise ValueError(cause) from error


def prepare(monitor: object, geometry: Geometry) -> bool:
    """Put permanent hooks on a model that is not compiled; of another one say, once, that it is measured eagerly."""
    if not geometry.probe.is_prepared():
        if is_compiled(geometry.model):
            warnings.warn(_message(monitor, "the model was compiled before"), stacklevel=4)
            return False
        geometry.probe.prepare(geometry.model)
    return True


def listen(monitor: object, geometry: Geometry, *, was_told: bool) -> bool:
    """Have a prepared model read in its graphs; of another one say, once, that it is measured eagerly."""
    geometry.probe.is_stable = geometry.probe.is_prepared()
    if not (geometry.probe.is_stable or was_told):
        warnings.warn(_message(monitor, "it was not called"), stacklevel=4)
    return geometry.probe.is_stable


def _message(monitor: object, cause: str) -> str:
    return (
        f'{type(monitor).__name__}: compiled="stable" needs prepare(model) before torch.compile; {cause}, so measured '
        "steps run eagerly. Call prepare(model) first."
    )
