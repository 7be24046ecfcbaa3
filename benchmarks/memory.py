"""Peak of what a measurement allocates, beside what `embedgeo.describe` states before it.

Layers of random rows, without a model: 33 of width 4,096 by default, which take some minutes. A
fiftieth of the rows is massive, so that each layer has both copies of its metrics.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from embedgeo import GeometryMonitor, StepMonitor, describe

_TYPES = 2048


class Layers(nn.Module):
    """A model without arithmetic, of layers that return random rows."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(_TYPES, width)
        self.layers = nn.ModuleList([_Layer(width) for _ in range(num_layers)])

    def forward(self, token_ids: Tensor) -> None:
        self.table(token_ids)
        for layer in self.layers:
            layer(token_ids)


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, token_ids: Tensor) -> Tensor:
        hidden = torch.randn(*token_ids.shape, self.width)
        hidden[:, :: token_ids.shape[1] // 10] *= 9  # massive rows
        return hidden


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that are allocated at a time in a run, as torch's profiler counts them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    events = sorted((each for each in events if each["name"] == "[memory]"), key=lambda e: e["ts"])
    allocated = [each["args"]["Total Allocated"] for each in events]
    return max(allocated) - (allocated[0] - events[0]["args"]["Bytes"])


def stated_and_taken(
    num_layers: int, width: int, batch: Tensor, num_batches: int, **options: Any
) -> tuple[int, int]:
    """Bytes that a description states, on device and host, and those that a measurement takes."""
    model = Layers(num_layers, width)
    options = {"layers": "layers.*", "on_error": "raise", **options}
    found = describe(GeometryMonitor(window=num_batches, **options), model, batch)
    monitor = StepMonitor(model, 2 * num_batches, window=num_batches, measure_last=False, **options)

    def run() -> None:
        for step in range(num_batches + 1):
            with monitor.step(step, batch):
                model(batch)

    taken = peak_bytes(run)
    monitor.close()
    return found.device_bytes + found.host_bytes, taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=33)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=512)
    parsed = parser.parse_args()
    batch = torch.arange(8 * parsed.tokens).view(8, -1) % _TYPES
    for name, num_batches, options in (
        ("one batch", 1, {}),
        ("two batches", 2, {}),
        ("two groups", 1, {"jackknife": 2}),
    ):
        stated, taken = stated_and_taken(parsed.layers, parsed.width, batch, num_batches, **options)
        ratio = f"{taken / 1e6:.0f} MB taken / {stated / 1e6:.0f} MB stated"
        print(f"{name}: {ratio} = {taken / stated:.2f}", flush=True)


if __name__ == "__main__":
    main()
