"""A loop of one's own on a GPU and on the CPU, in one process and on ranks; comparison of their
records.
"""

import pytest
import torch

from embedgeo import StepMonitor, default_metrics
from tests.cuda import GPU, a_gpu
from tests.models import gpt_neox, token_batch

NUM_STEPS = 2


def trained(device, *, rank=0, **options):
    """Weights and records of a run in float64, whose hidden states are the same on all devices;
    without options none.

    Each rank has batches of its own; gradients are not averaged, so that its weights are its own.
    """

    def batch(seed, **padding):
        return {
            key: each.to(device)
            for key, each in token_batch(16, 12, seed=seed + 10 * rank, **padding).items()
        }

    torch.manual_seed(0)
    # one for all devices
    model = gpt_neox(num_hidden_layers=2, attn_implementation="eager").double().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options.pop("probed", False):
        options["probe"] = [batch(seed, padding="left") for seed in (7, 8)]
    if options.get("rows") == "words":
        words = (torch.arange(12) // 2).expand(16, 12).to(device)
        options["word_ids"] = lambda batch: words
    monitor = StepMonitor(model, 1, on_error="raise", **options) if options else None
    for step in range(NUM_STEPS):
        given = batch(step)
        with monitor.step(step, given) if monitor else torch.enable_grad():
            model(**given, labels=given["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if monitor:
        monitor.close()
    return [
        weight.detach().cpu() for weight in model.parameters()
    ], monitor.history if monitor else []


def records(rank, options):
    """Of a run on the GPU, and of one on the CPU; to be called on each rank."""
    with a_gpu():
        return [trained(device, rank=rank, **options)[1] for device in (GPU, "cpu")]


def records_with_nan(rank):
    """Records of a model whose last block gives rows of NaN: on the GPU, and on the CPU; to be
    called on each rank.

    They are the first rows of each sequence, some others, and on one rank a whole sequence.
    """

    def metrics(dim):
        return default_metrics(
            dim, anisotropy_batch=50, extra=["coordinates", "next_token", "similarity"]
        )

    def found(device):
        torch.manual_seed(0)
        model = (
            gpt_neox(num_hidden_layers=2, attn_implementation="eager").double().eval().to(device)
        )
        is_nan = torch.rand(16, 12, generator=torch.Generator().manual_seed(rank)) < 0.2
        is_nan[:, 0] = True
        is_nan[3] |= rank == 1
        fill = torch.where(is_nan, torch.nan, 0.0).double()[..., None].to(device)
        model.gpt_neox.layers[-1].register_forward_hook(lambda module, args, hidden: hidden + fill)
        monitor = StepMonitor(
            model, 1, on_error="raise", layers=["block.*"], metrics=metrics, jackknife=2
        )
        with monitor, torch.no_grad():
            for step in range(2):
                given = {
                    key: each.to(device)
                    for key, each in token_batch(16, 12, seed=10 * rank + step).items()
                }
                with monitor.step(step, given):
                    model(**given)
        return monitor.history

    with a_gpu():
        return [found(device) for device in (GPU, "cpu")]


def assert_same(found, expected):
    """Records that are the same but for rounding; TwoNN's distances are exact to 1e-6."""
    names = "step", "layer", "metric"
    assert [[record.get(name) for name in names] for record in found] == [
        [record.get(name) for name in names] for record in expected
    ]
    for got, want in zip(found, expected, strict=True):
        rel = 1e-5 if "intrinsic_dimension" in want["metric"] else 1e-7
        assert got["value"] == pytest.approx(want["value"], rel=rel, abs=1e-9, nan_ok=True), want
        assert got["stderr"] == pytest.approx(want["stderr"], rel=1e-4, abs=1e-9, nan_ok=True), want
