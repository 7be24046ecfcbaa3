"""What the monitor needs from a trainer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from embedgeo.results.schema import Record


@dataclass(frozen=True)
class TrainerAdapter:
    """One training run, as a `embedgeo.training.monitor.Monitor` uses it.

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
