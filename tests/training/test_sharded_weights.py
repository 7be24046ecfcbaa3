"""What becomes of weights of which each rank has a part, in forward passes and between them."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from embedgeo import StepMonitor
from tests.models import NanoGPT, token_batch
from tests.ranks import on_two_ranks
from tests.training.runs import all_warnings, row_counts, steps
from tests.training.sharding import sharded_by_wrappers, sharded_in_place


class WithTarget(nn.Module):
    """A model, and a copy that each forward pass moves towards it, as BYOL's does."""

    def __init__(self):
        super().__init__()
        self.online = NanoGPT()
        self.target = deepcopy(self.online).requires_grad_(False)

    def forward(self, ids):
        blocks = (each.transformer.h.parameters() for each in (self.target, self.online))
        with torch.no_grad():
            for target, weight in zip(*blocks, strict=True):
                target.mul_(0.9).add_(weight, alpha=0.1)
        return self.online(ids) - self.target(ids)


def said_of_a_target(rank):
    """What a monitor with a probe says of a model whose passes move sharded weights."""
    model = WithTarget()
    for block in (*model.online.transformer.h, *model.target.transformer.h):
        fully_shard(block)
    fully_shard(model)
    ids = token_batch(2, seed=9)["input_ids"]
    monitor = StepMonitor(model, layers=lambda model: model.online, probe=[ids])
    with all_warnings() as said, monitor, monitor.step(0, ids):
        model(ids).square().mean().backward()
    return " ".join(str(each.message) for each in said)


def left_over(rank, shard):
    """Steps measured of a loop whose last micro-batch no optimizer step follows."""
    torch.manual_seed(0)
    model = shard(NanoGPT())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with StepMonitor(model, 10, extra_steps=(1,)) as monitor:
        for number in range(5):
            ids = token_batch(2, seed=rank + 2 * number)["input_ids"]
            with monitor.step(number // 2, ids):
                model(ids).square().mean().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    return steps(monitor)


def adversarial(rank):
    """Rows of each step where tables are moved by ``.data`` for a second pass."""
    torch.manual_seed(0)
    inside = NanoGPT()
    model = DistributedDataParallel(inside)
    table = inside.transformer.wte.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = StepMonitor(model, 1, measure_last=False)
    ids = token_batch(2, seed=rank)["input_ids"]
    for step in range(2):
        with monitor.step(step, ids):
            model(ids).square().mean().backward()
            before = table.data.clone()
            table.data.add_(table.grad.sign(), alpha=0.1)
            model(ids).square().mean().backward()
            table.data = before
            optimizer.step()
            optimizer.zero_grad()
    monitor.close()
    return {n / ids.numel() for n in row_counts(monitor)}


def all_of(rank):
    return {
        "target": said_of_a_target(rank),
        "left over": [left_over(rank, each) for each in (sharded_in_place, sharded_by_wrappers)],
        "adversarial": adversarial(rank),
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return on_two_ranks(all_of, tmp_path_factory.mktemp("sharded"))


def test_a_pass_that_moves_sharded_weights_is_refused(two):
    for rank in two:
        assert "a forward pass must not change parameters in place" in rank["target"]


def test_weights_that_no_optimizer_has_changed_have_the_step_of_before(two):
    for rank in two:
        assert rank["left over"] == [[0, 1, 2]] * 2


def test_a_second_pass_of_tables_moved_by_their_data_does_not_count_under_ddp(two):
    for rank in two:
        assert rank["adversarial"] == {2.0}
