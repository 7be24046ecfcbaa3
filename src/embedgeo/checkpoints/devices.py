"""Where the weights of a model go: a device map, as accelerate takes it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

DeviceMap = str | Mapping[str, Any]
"""``"auto"``, or devices by names of modules, where the innermost name counts; ``"disk"``: read when it is needed."""


def placement(model: nn.Module, device_map: DeviceMap) -> str | dict[str, str]:
    """A device map of modules none of which is inside another, as accelerate needs it; ``"auto"`` as it is.

    Raises:
        ValueError: modules that the model does not have, devices that the machine does not have, or weights without a
            device.

    >>> placement(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {"": "cpu", "1": "disk"})
    {'0': 'cpu', '1': 'disk'}
    """
    if isinstance(device_map, str):
        return device_map
    names = [name for name, _ in model.named_modules()]
    if unknown := sorted(map(str, device_map.keys() - set(names))):
        kind = type(model).__name__
        raise ValueError(f"device_map must name modules of {kind}, such as {names[-1]!r}; got {', '.join(unknown)}.")
    devices = {name: _device(value) for name, value in device_map.items()}
    placed: dict[str, str] = {}

    def place(name: str, part: nn.Module, outer: str | None) -> None:
        prefix, device = f"{name}." if name else "", devices.get(name, outer)
        if any(other.startswith(prefix) and other != name for other in devices):
            for child, inner in part.named_children():
                place(prefix + child, inner, device)
            own = [prefix + each for each, _ in part.named_parameters(recurse=False)]
        else:
            own = [name] if any(True for _ in part.parameters()) else []
        if own and device is None:
            raise ValueError(f"device_map must give each weight a device; {own[0]} has none. Add one for '': the rest.")
        placed.update({each: str(device) for each in own})

    place("", model, None)
    return placed


def _device(value: Any) -> str:
    """The name of one of the machine's devices, or ``disk``."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if accelerator else 0
    known = ["cpu", "disk", *(f"{accelerator}:{i}" for i in range(count))]
    try:
        device = torch.device("cpu" if value == "disk" else value)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    name = device.type if device.type == "cpu" else f"{device.type}:{device.index or 0}"
    if name not in known:
        raise ValueError(f"device_map must name devices of this machine, {', '.join(known)}; got {value!r}.")
    return "disk" if value == "disk" else name
