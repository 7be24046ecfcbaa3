"""The most memory that a measurement takes, beside what `embedgeo.describe` states before it.

Layers of random rows, without a model: 33 of width 4,096 by default, which take some minutes. A
fiftieth of the rows is massive, so that each layer has both copies of its metrics. On several ranks
it is the memory of the first one.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

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


def stated_and_taken(
    num_layers: int, width: int, num_tokens: int, num_batches: int, jackknife: int
) -> tuple[int, int]:
    """Bytes that a description states, on device and host, and those by which this process grows
    in a measurement at most.
    """
    model = Layers(num_layers, width)
    batch = torch.arange(8 * num_tokens).view(8, -1) % _TYPES
    options: dict[str, Any] = {
        "layers": "layers.*",
        "window": num_batches,
        "jackknife": jackknife,
        "on_error": "raise",
    }
    found = describe(GeometryMonitor(**options), model, batch)
    monitor = StepMonitor(model, 2 * num_batches, measure_last=False, **options)
    model(batch)
    before = _most_resident()
    for step in range(num_batches + 1):
        with monitor.step(step, batch):
            model(batch)
    assert monitor.history
    return found.device_bytes + found.host_bytes, _most_resident() - before


def _most_resident() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def on_rank(rank: int, num_ranks: int, file: str, size: tuple[int, int, int], case: str) -> None:
    """Print what one case takes, in a process of a group of several."""
    torch.manual_seed(rank)
    if num_ranks > 1:
        dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=num_ranks)
    stated, taken = stated_and_taken(*size, *CASES[case])
    if rank == 0:
        ratio = f"{taken / 1e6:.0f} MB taken / {stated / 1e6:.0f} MB stated"
        print(f"{case}: {ratio} = {taken / stated:.2f}", flush=True)
    if num_ranks > 1:
        dist.destroy_process_group()


CASES = {"one batch": (1, 0), "two batches": (2, 0), "four groups": (1, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=33)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=512, help="of each of 8 sequences")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--only", choices=CASES)
    parsed = parser.parse_args()
    if parsed.only:
        size = parsed.layers, parsed.width, parsed.tokens
        with tempfile.TemporaryDirectory() as folder:
            given = parsed.ranks, f"{folder}/init", size, parsed.only
            mp.spawn(on_rank, given, parsed.ranks)
    else:
        for case in CASES:
            subprocess.run([sys.executable, *sys.orig_argv[1:], "--only", case], check=True)


if __name__ == "__main__":
    main()
