"""Ranks whose parameters are sharded train as without the monitor, and ranks that do not meet go
on.
"""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from embedgeo import StepMonitor
from tests.models import NanoGPT, token_batch
from tests.ranks import on_two_ranks

pytestmark = pytest.mark.slow


def fails(model, batch):
    def stop(*_):
        raise RuntimeError("inside of a block")

    with model.transformer.h[1].mlp.register_forward_hook(stop):
        model(batch)


def sharded_losses(rank, monitored, **options):
    """Losses of a run, and after it, with weights edited between steps and at the end."""
    torch.manual_seed(0)
    model = NanoGPT()
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = StepMonitor(model, 2, **options) if monitored else None
    ids = token_batch(2, seed=rank)["input_ids"]
    losses = []

    def edit():
        with torch.no_grad():
            for weight in optimizer.param_groups[0]["params"]:
                weight.mul_(0.9)

    for step in range(4):
        with monitor.step(step, ids) if monitor else torch.enable_grad():
            loss = model(ids).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        edit()
    if monitor:
        monitor.close()
    edit()
    with torch.no_grad():
        losses.append(model(ids).square().mean().item())
    return losses


def all_sharded_losses(rank):
    probe = [token_batch(2, seed=9)["input_ids"]]
    inside = {"probe": probe, "probe_forward": fails}
    return {
        "plain": sharded_losses(rank, monitored=False),
        "last weights": sharded_losses(rank, monitored=True),
        "probe": sharded_losses(rank, monitored=True, probe=probe),
        "probe that fails": sharded_losses(rank, monitored=True, **inside),
    }


def test_sharded_parameters_are_sharded_again_after_each_forward_of_the_monitor(tmp_path):
    for rank in on_two_ranks(all_sharded_losses, tmp_path):
        plain = rank.pop("plain")
        for how, losses in rank.items():
            assert losses == plain, how
