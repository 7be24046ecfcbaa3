"""Training steps and measurements of models; see `benchmarks.gpu`."""

import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torchmetrics import Metric
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from benchmarks.gpu_clock import DEVICE, GPU, median_ms, peak_mb, rounds, spread, waits
from embedgeo import Anisotropy, IntrinsicDimension, StepMonitor, observe

SHAPES = {"160m": (768, 12, 12), "410m": (1024, 24, 16), "tiny": (32, 2, 2)}  # width, layers, heads
WAYS = "eager", "compiled"


def zipf(vocabulary: int, *shape: int) -> Tensor:
    weights = 1 / np.arange(1, vocabulary + 1) ** 1.07
    ids = np.random.default_rng(0).choice(vocabulary, shape, p=weights / weights.sum())
    return torch.from_numpy(ids).to(DEVICE)


def make_model(shape: str) -> GPTNeoXForCausalLM:
    width, layers, heads = SHAPES[shape]
    size = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    vocabulary = 50_304 if shape != "tiny" else 200
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=vocabulary, intermediate_size=4 * width, max_position_embeddings=2048, **size
    )
    return GPTNeoXForCausalLM(config).to(DEVICE, torch.bfloat16).train()


def measurement(shape: str, batch: tuple[int, int], num_rounds: int) -> dict[str, Any]:
    model, times = make_model(shape), Counter[str]()
    ids = zipf(model.config.vocab_size, *batch)
    forward = partial(model, input_ids=ids, use_cache=False, logits_to_keep=1)

    def observed() -> Any:
        with observe(model) as geometry:
            forward()
        return geometry

    with torch.no_grad():
        passes = rounds({"plain": forward, "observed": observed}, num_rounds)
        geometry = observed()
        with waits() as forward_lines:
            forward()
        with waits() as update_lines:
            observed().reset()
        compute = median_ms(geometry.compute, num_rounds)
        with waits() as compute_lines:
            geometry.compute()
        peak = peak_mb(lambda: observed().compute())
        hidden = model(
            input_ids=ids, use_cache=False, output_hidden_states=True, logits_to_keep=1
        ).hidden_states
    kinds: dict[str, Callable[[int], Metric]] = {
        "twonn_ms": IntrinsicDimension,
        "anisotropy_ms": Anisotropy,
    }
    for name, kind in kinds.items():
        for state in hidden:
            metric = kind(state.shape[-1])
            metric.update(state)
            times[name] += median_ms(metric.compute, 1)
    # the last block and the final norm share one of these
    of_layers = (len(geometry.layers)) / len(hidden)
    parts = {name: of_layers * times[name] for name in kinds}
    return {
        "batch": list(batch),
        "layers": len(geometry.layers),
        "forward_ms": 1e3 * float(np.median(passes["plain"])),
        "updates_ms": 1e3 * float(np.median(np.subtract(passes["observed"], passes["plain"]))),
        "compute_ms": compute,
        **parts,
        "other_ms": compute - sum(parts.values()),
        "forward_waits": forward_lines.total() if GPU else None,
        "update_waits": update_lines.total() if GPU else None,
        "compute_waits": compute_lines.total() if GPU else None,
        "waits_at": {
            "update": update_lines.most_common(12),
            "compute": compute_lines.most_common(12),
        },
        "peak_MB": peak,
    }


def ranks(shape: str, batch: tuple[int, int], num_rounds: int) -> dict[str, Any]:
    model = make_model(shape)
    with observe(model) as geometry, torch.no_grad():
        model(input_ids=zipf(model.config.vocab_size, *batch), use_cache=False, logits_to_keep=1)
    alone, backend = median_ms(geometry.compute, num_rounds), "nccl" if GPU else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            together = median_ms(geometry.compute, num_rounds)
        finally:
            dist.destroy_process_group()
    return {"backend": backend, "ranks": 1, "compute_ms": together, "alone_ms": alone}


def new_backend() -> Callable[..., Any]:
    """A backend of one model's own: graphs of other models of the class would fit, for hooks are
    not compared.
    """
    compile_graph = torch._dynamo.lookup_backend("inductor" if GPU else "eager")

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        return compile_graph(graph, inputs)

    return backend


def steps(
    shape: str, way: str, batch: tuple[int, int], num_rounds: int, block: int
) -> dict[str, Any]:
    stats: list[dict[str, int]] = []
    monitors: list[StepMonitor] = []

    def counted(run: Callable[[], object]) -> None:
        before = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        run()
        now = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        stats.append({"graphs": now[0] - before[0], "breaks": now[1] - before[1]})

    def loop(monitored: bool) -> Callable[[], None]:
        """What trains for a block of steps; if monitored, the first step of every other block is
        measured.
        """
        model, at = make_model(shape), [0]
        ids, monitor = zipf(model.config.vocab_size, *batch), None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        run: Any = model
        if way == "compiled":
            run = torch.compile(model, backend=new_backend(), dynamic=False)
        if monitored:
            monitor = StepMonitor(run, 2 * block, measure_last=False, on_error="raise")
        monitors.extend([monitor] if monitor else [])

        def train() -> None:
            for _ in range(block):
                with monitor.step(at[0]) if monitor else nullcontext():
                    run(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                at[0] += 1

        return train

    plain, monitored = loop(False), loop(True)
    for side in (plain, monitored):
        counted(side)
    monitored()  # so that the next block begins with a measurement again
    times = rounds({"plain": plain, "measured": monitored, "unmeasured": monitored}, num_rounds)
    for monitor in monitors:
        monitor.close()
    of_step = np.array(times["plain"]) / block
    added = np.array(times["measured"]) - times["plain"]
    return {
        "batch": list(batch),
        "block": block,
        "plain_ms": spread(1e3 * of_step),
        "added_ms": spread(1e3 * added),
        "measured_over_plain": spread(1 + added / of_step),
        "unmeasured_over_plain": spread(np.array(times["unmeasured"]) / times["plain"]),
        "plain": stats[0],
        "monitored": stats[1],
    }
