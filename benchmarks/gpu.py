"""What measuring costs on a GPU: training steps, the parts of a measurement, TwoNN, waits for the
GPU, TF32, NCCL.

python -m benchmarks.gpu --json gpu.json   # some seven minutes on one H100
python -m benchmarks.gpu --tiny            # seconds; without a GPU it is a trial on the CPU, and
says so

Sides take turns, and medians of their rounds are compared. Clocks are read when the GPU has
finished, so that what the CPU waits for counts. The JSON has an entry for each part, written as
soon as it is there; ``_ms`` are milliseconds:

- ``device``: name, versions, ``is_gpu``, and its ceilings, ``copy_GB_per_s`` and
  ``bfloat16_TFLOP_per_s``.
- ``tf32``: for each metric the value that differs most, relatively, from that of the same rows in
  float64, with TF32 allowed (``high``) and not (``highest``); ``product`` is the same of a plain
  product, to compare with.
- ``twonn``: of ``rows`` x ``width``, the ``ms`` of `two_nearest_distances`; ``peak_MB`` beyond the
  rows; ``floor_ms``, one product of that size at the rate of ``device``; ``peer_ms`` of
  ``torch.cdist`` with ``topk`` (null: too large).
- ``measurement <model>``: ``updates_ms``, what reading and updating adds to ``forward_ms``;
  ``compute_ms`` of all layers, and of that ``twonn_ms``, ``anisotropy_ms`` and ``other_ms``; the
  operations that the CPU waited for in a plain pass, in a measured one and in computing,
  ``forward_waits``, ``update_waits`` and ``compute_waits`` (null on the CPU), and the lines with
  most of them, ``waits_at``; ``peak_MB``, the most memory held during a measurement.
- ``ranks``: ``compute_ms`` in a process group of one rank, by NCCL (gloo on the CPU), and
  ``alone_ms`` without.
- ``steps <model> <way>``: ``plain_ms`` of a training step; ``added_ms`` by a measurement;
  ``measured_over_plain``, 1 + added_ms / plain_ms; ``unmeasured_over_plain``; medians, with ``low``
  and ``high`` of the rounds; ``plain`` and ``monitored``, the ``graphs`` that were compiled without
  the monitor and with it, and their ``breaks``. The ways: eager, compiled.
- ``errors``: what has failed, by part; the others go on.
"""

import argparse
import gc
import json
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from benchmarks.gpu_clock import DEVICE, GPU, median_ms, peak_mb
from benchmarks.gpu_models import WAYS, measurement, ranks, steps, zipf
from embedgeo import Anisotropy, IntrinsicDimension, TokenMoments
from embedgeo.functional import two_nearest_distances


def device() -> dict[str, Any]:
    n, size = (8192, 1 << 30) if GPU else (256, 1 << 20)
    a, b = (torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    block = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    name = torch.cuda.get_device_name() if GPU else "the CPU: a trial, not a result"
    return {
        "name": name,
        "is_gpu": GPU,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "copy_GB_per_s": 2 * size / median_ms(block.clone, 5) / 1e6,
        "bfloat16_TFLOP_per_s": 2 * n**3 / median_ms(lambda: a @ b, 5) / 1e9,
    }


def tf32(n: int, width: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = 10 + torch.randn(n, width, generator=generator) * torch.rand(width, generator=generator)
    x, ids = x.to(DEVICE), zipf(1000, n)
    kinds: list[Callable[[int], Metric]] = [TokenMoments, Anisotropy, IntrinsicDimension]

    def values(dtype: torch.dtype) -> dict[str, dict[str, float]]:
        found = {}
        for kind in kinds:
            metric = kind(width)
            metric.update(x.to(dtype), token_ids=ids)
            found[type(metric).__name__] = {
                key: float(value) for key, value in metric.compute().items()
            }
        return {
            **found,
            "product": {"sum": float((x.to(dtype).T @ x.to(dtype)).double().square().sum())},
        }

    def farthest(got: dict[str, float], exact: dict[str, float]) -> dict[str, float]:
        errors = {
            key: abs(got[key] / exact[key] - 1)
            for key in exact
            if exact[key] and exact[key] == exact[key]
        }
        key = max(errors, key=lambda key: errors[key])
        return {key: errors[key]}

    exact, of = values(torch.float64), {}
    for precision in ("high", "highest"):
        torch.set_float32_matmul_precision(precision)
        of[precision] = {
            name: farthest(got, exact[name]) for name, got in values(torch.float32).items()
        }
    return of


def twonn(sizes: list[tuple[int, int]], rate: float, num_rounds: int) -> list[dict[str, Any]]:
    def peer(x: Tensor) -> Tensor:
        return torch.cdist(x, x).topk(3, largest=False).values

    found = []
    for n, width in sizes:
        x = torch.randn(n, width, device=DEVICE)
        floor, is_small = 2 * n * n * width / rate / 1e9, n <= 16_384
        times: dict[str, Any] = {
            "ms": median_ms(partial(two_nearest_distances, x), num_rounds),
            "floor_ms": floor,
        }
        times |= {"peer_ms": median_ms(partial(peer, x), num_rounds) if is_small else None}
        found.append(
            {
                "rows": n,
                "width": width,
                **times,
                "peak_MB": peak_mb(partial(two_nearest_distances, x)),
            }
        )
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try it out")
    parser.add_argument(
        "--only", nargs="+", help="parts whose names begin so; device is always there"
    )
    given = parser.parse_args(arguments)
    batch, num_rounds = ((2, 16), 1) if given.tiny else ((16, 1024), 5)
    shapes = ["tiny"] if given.tiny else ["160m", "410m"]
    sizes = [(200, 8)] if given.tiny else [(4096, 768), (16_384, 1024), (65_536, 1024)]
    results: dict[str, Any] = {"device": device(), "errors": {}}
    print(json.dumps(results["device"], indent=2))
    parts: dict[str, Callable[[], Any]] = {
        "tf32": partial(tf32, *((300, 8) if given.tiny else (8192, 768))),
        "twonn": partial(twonn, sizes, results["device"]["bfloat16_TFLOP_per_s"], num_rounds),
        **{
            f"measurement {shape}": partial(measurement, shape, batch, num_rounds)
            for shape in shapes
        },
        "ranks": partial(ranks, shapes[0], batch, num_rounds),
    }
    block = 2 if given.tiny else 8
    for shape in shapes:
        few = min(num_rounds, 3) if shape == "410m" else num_rounds
        parts |= {
            f"steps {shape} {way}": partial(steps, shape, way, batch, few, block) for way in WAYS
        }
    for name, part in parts.items():
        if given.only and not any(name.startswith(only) for only in given.only):
            continue
        try:
            results[name] = part()
            print(f"{name}: {json.dumps(results[name])}", flush=True)
        except Exception as error:
            results["errors"][name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        torch.compiler.reset()
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()
        if given.json:
            given.json.write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
