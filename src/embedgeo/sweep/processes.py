"""The processes of a sweep, each with the whole model; libraries that keep quiet in them, and their
versions.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy

from embedgeo.formatting import reason

T = TypeVar("T")
# on options that are the user's choice, on how lightning walks batches, and to the writer of a file
_ADVICE = (
    ".*does not have many workers|GPU available but not used|.*treespec, LeafSpec|Detected pickle "
    "protocol"
)


@contextmanager
def muted_libraries() -> Iterator[None]:
    """Context without the progress bars, log messages and advice of the libraries that load and run
    models.
    """
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    with ExitStack() as after, warnings.catch_warnings():
        warnings.filterwarnings("ignore", _ADVICE)
        after.callback(setattr, warnings, "formatwarning", warnings.formatwarning)
        # not where in the code it is from
        warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
        for library in (hub_logging, transformers_logging):
            after.callback(library.set_verbosity, library.get_verbosity())
            library.set_verbosity(logging.ERROR)
        for name in ("accelerate", "lightning.pytorch", "lightning.fabric"):
            logger = logging.getLogger(name)
            after.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        after.callback(enable_progress_bars)
        disable_progress_bars()
        if transformers_logging.is_progress_bar_enabled():
            after.callback(transformers_logging.enable_progress_bar)
        transformers_logging.disable_progress_bar()
        yield


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers depend on."""
    names = ("embedgeo", "huggingface_hub", "lightning", "torch", "torchmetrics", "transformers")
    return {name: version(name) for name in names}


def make_fabric(options: Mapping[str, Any]) -> Fabric:
    """Lightning's Fabric with the given options; by default one device."""
    try:
        fabric = Fabric(**{"devices": 1, **options})
    except Exception as error:  # of several kinds, one of them lightning's own
        raise ValueError(
            f"trainer must be options that lightning accepts here; {reason(error)}"
        ) from error
    is_whole = isinstance(fabric.strategy, DDPStrategy | SingleDeviceStrategy)
    if not is_whole or "MultiProcessing" in type(fabric.strategy.launcher).__name__:
        raise ValueError(
            "trainer.strategy must keep its processes over the sweep, and the model whole in "
            f"each, as ddp does; got {options.get('strategy', 'auto')!r}."
        )
    return fabric


@contextmanager
def launched(fabric: Fabric) -> Iterator[None]:
    """Start the other processes; they end with this one when it is interrupted."""
    fabric.launch()
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        for process in getattr(fabric.strategy.launcher, "procs", ()):
            process.kill()  # it may be waiting for this one, and does not return from that
        raise


@contextmanager
def all_agree(fabric: Fabric) -> Iterator[None]:
    """Raise on every rank if the body has raised on one; for what may fail on some ranks only."""
    try:
        yield
    except Exception:
        fabric.strategy.reduce_boolean_decision(False)
        raise
    if not fabric.strategy.reduce_boolean_decision(True):
        raise RuntimeError("it failed on another rank")


def from_local_zero(fabric: Fabric, value: T) -> T:
    """The value of the process with local rank 0 on this node; every rank must call this."""
    if fabric.world_size == 1:
        return value
    values: list[Any] = [None] * fabric.world_size
    dist.all_gather_object(values, (fabric.node_rank, fabric.local_rank, value))
    return next(other for node, local, other in values if (node, local) == (fabric.node_rank, 0))
