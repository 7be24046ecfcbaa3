"""Ranks whose parameters are sharded train as without the monitor, and ranks that do not meet go
on.
"""

import re
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from embedgeo import StepMonitor, observe
from embedgeo.capture.structure import measured_model
from embedgeo.functional.distributed import Meetings
from tests.models import NanoGPT, token_batch
from tests.ranks import on_two_ranks
from tests.training.runs import UserError, all_warnings, of_monitors, steps
from tests.training.sharding import Headed, sharded_by_wrappers, sharded_in_place

pytestmark = pytest.mark.slow


def fails(model, batch):
    def stop(*_):
        raise RuntimeError("inside of a block")

    with measured_model(model).transformer.h[1].mlp.register_forward_hook(stop):
        model(batch)


def sharded_twice(model):
    fully_shard(model.lm)
    return fully_shard(model)


def centred_copies(model):
    """A running centre of the hidden states in a buffer, that of rank 0 on all ranks."""

    def centre(block, args, out):
        block.centre.lerp_(out.detach().mean((0, 1)), 0.1)
        return out - block.centre

    block = model.transformer.h[0]
    block.register_buffer("centre", torch.zeros(model.transformer.wte.embedding_dim))
    block.register_forward_hook(centre)
    return DistributedDataParallel(model)


def sharded_losses(rank, shard, monitored, of=NanoGPT, early=False, **options):
    """Losses of a run, and after it, with weights edited before forward passes and at the end; a
    monitor may be ``early``, given the model before it is sharded.
    """
    torch.manual_seed(0)
    known = of()
    model = shard(known)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = StepMonitor(known if early else model, 2, **options) if monitored else None
    ids = token_batch(2, seed=rank)
    ids = ids if of is Headed else ids["input_ids"]
    losses = []

    def edit():
        with torch.no_grad():
            for weight in optimizer.param_groups[0]["params"]:
                weight.mul_(0.9)

    for step in range(4):
        with monitor.step(step, ids) if monitor else torch.enable_grad():
            edit()
            loss = model(ids).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if monitor:
        monitor.close()
    edit()
    with torch.no_grad():
        losses.append(model(ids).square().mean().item())
    return losses


def all_sharded_losses(rank):
    probe = [token_batch(2, seed=9)["input_ids"]]
    inside = {"probe": probe, "probe_forward": fails}
    forms = (
        sharded_in_place,
        sharded_by_wrappers,
        partial(sharded_by_wrappers, strategy=ShardingStrategy.SHARD_GRAD_OP),
        centred_copies,
    )
    return [
        {
            "plain": sharded_losses(rank, shard, monitored=False),
            "last weights": sharded_losses(rank, shard, monitored=True),
            "probe": sharded_losses(rank, shard, monitored=True, probe=probe),
            "probe that fails": sharded_losses(rank, shard, monitored=True, **inside),
        }
        for shard in forms
    ] + [wrapped_losses(rank, shard) for shard in (sharded_twice, sharded_by_wrappers)]


def wrapped_losses(rank, shard):
    run = partial(sharded_losses, rank, shard, of=Headed)
    probe = {"monitored": True, "probe": [token_batch(2, seed=9)]}
    with all_warnings() as caught:
        losses = {"plain": run(monitored=False), "probe": run(**probe)}
        assert of_monitors(caught) == []
        losses["early"] = run(early=True, **probe)
    refused = ["FSDP has wrapped; got a Headed" in said for said in of_monitors(caught)]
    assert refused == [True] * (shard is sharded_by_wrappers)
    return losses


def refusals_of_parts(rank):
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))
    with pytest.raises(ValueError, match=r"device_mesh= or process_group= must .* 1 of 2"):
        StepMonitor(sharded_by_wrappers(NanoGPT(), group=mesh["dp"].get_group()))
    with pytest.raises(ValueError, match=r"device_mesh= or process_group= must .* 1 of 2"):
        StepMonitor(fully_shard(NanoGPT(), mesh=mesh["dp"]))


PROBE = [token_batch(2, seed=9)["input_ids"]]
# how rank 1 differs, the steps that are measured on each rank, what rank 0 is told
APART = {
    "no monitor": ({}, [], "must be on every rank"),
    "every_n_steps": (
        {"every_n_steps": 3},
        [],
        "options must be the same .* every_n_steps= differs",
    ),
    "extra_steps": ({"extra_steps": [1]}, [], "extra_steps= differs"),
    "window": ({"window": 2}, [], "window= differs"),
    "probe": ({"probe": PROBE}, [], "probe= differs"),
    "listeners": ({"listeners": [print]}, [], "listeners= differs"),
    "mask": ({"mask": lambda batch: batch}, [], "mask= differs"),
    "exception": ({}, [0, 2, 6], "step 4 is not measured"),
    "skipped step": ({}, [0, 2, 6], "at step 4 some have not come"),
    "closed early": ({}, [0, 2], "some have not come"),
}


def trained_apart(rank, how):
    """How many steps a rank has trained, those measured, and what it was told."""
    torch.manual_seed(0)
    model = DistributedDataParallel(NanoGPT())
    options = {
        "every_n_steps": 2,
        "measure_last": False,
        "layers": ["blocks", lambda model: {"first": measured_model(model).transformer.h[0]}],
        "mask": lambda batch: None,
    } | (APART[how][0] if rank else {})
    num_steps = 0
    with all_warnings() as caught:
        monitor = None if rank and how == "no monitor" else StepMonitor(model, **options)
        if monitor:
            monitor.wait_seconds = 0.5
        for step in range(8):
            if rank and how == "closed early" and step == 4:
                monitor.close()
                monitor = None
            skips = monitor is None or (rank and how == "skipped step" and step == 4)
            with suppress(UserError), torch.enable_grad() if skips else monitor.step(step):
                model(token_batch(2, seed=2 * step + rank)["input_ids"]).square().mean().backward()
                if rank and how == "exception" and step == 4:
                    raise UserError
            num_steps += 1
        if monitor:
            monitor.close()
    measured = steps(monitor) if monitor else None
    return num_steps, measured, of_monitors(caught)


def observed_alone(rank):
    """What a rank that asks for values is told, at first alone, and a sum of both after it."""
    model, told = NanoGPT(), []
    for asking in (1, 2, 1):
        with torch.no_grad(), observe(model, "embed") as geometry:
            model(token_batch(2, seed=rank)["input_ids"])
        geometry.wait_seconds, said = 0.5, ""
        try:
            said = str(geometry.compute()["embed"]["n"] if rank < asking else "")
        except RuntimeError as error:
            said = str(error)[-25:]
        total = torch.tensor(rank + 1)
        dist.all_reduce(total)
        told.append((said, int(total)))
    return told


def waits(rank):
    """For how long a rank waits at each step for one that skips three of them."""
    waited = {}

    def come(self, occasion, seconds, *said):
        if occasion.startswith("step "):
            waited[int(occasion.split()[1])] = seconds
        return of_meetings(self, occasion, seconds, *said)

    of_meetings, Meetings.come = Meetings.come, come
    model = DistributedDataParallel(NanoGPT())
    with all_warnings(), StepMonitor(model, 1, measure_last=False) as monitor:
        monitor.wait_seconds = 1.6
        for step in range(7):
            skips = rank and step in (2, 3, 4)
            with torch.enable_grad() if skips else monitor.step(step):
                model(token_batch(2, seed=rank)["input_ids"]).square().mean().backward()
            dist.barrier()
    Meetings.come = of_meetings
    return waited


def everything(rank):
    refusals_of_parts(rank)
    sharded = all_sharded_losses(rank)
    apart = {how: trained_apart(rank, how) for how in APART}
    return sharded, apart, observed_alone(rank), waits(rank)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_two_ranks(everything, tmp_path_factory.mktemp("ranks"), seconds=300)


def test_ranks_train_as_without_the_forward_passes_of_the_monitor(ranks):
    for sharded, *_ in ranks:
        for form in sharded:
            for how, losses in form.items():
                assert losses == form["plain"], how


def test_values_are_refused_to_a_rank_alone_and_no_other_collective_meets_theirs(ranks):
    alone = "Call it on every rank."
    for number, (*_, told, _) in enumerate(ranks):
        values = ("", "48.0", "") if number else (alone, "48.0", alone)
        assert [(said[-len(alone) :], total) for said, total in told] == [(v, 3) for v in values]


def test_ranks_that_do_not_meet_train_on_and_lose_that_measurement_alone(ranks):
    for number, (_, apart, *_) in enumerate(ranks):
        for how, (num_steps, measured, told) in apart.items():
            assert num_steps == 8, how
            if measured is not None:
                assert measured == APART[how][1], how
                assert len(told) == 1, how
            if number == 0:
                assert re.search(APART[how][2], told[0]), how


def test_each_wait_for_a_rank_that_stays_away_is_half_as_long(ranks):
    *_, waited = ranks[0]
    # that of step 1 is complete at the next one
    assert waited == {0: 1.6, 1: 1.6, 2: 0.8, 3: 0.4, 4: 0.2, 5: 0.1, 6: 1.6}
