"""What a stable probe reads in the graphs of torch.compile, and that these are the graphs of
training without it.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from embedgeo import Geometry, observe
from tests.compiled import CountingBackend
from tests.models import albert, token_batch
from tests.training.runs import moments

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch's


@pytest.fixture(autouse=True)
def no_recompilation():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def whole(model, **options):
    return torch.compile(model, fullgraph=True, **options)


def blocks_in_place(model, **options):
    for block in model.h:
        block.compile(fullgraph=True, **options)
    return model


def checkpointed_blocks(model, **options):
    for i, block in enumerate(model.h):
        model.h[i] = checkpoint_wrapper(block)
        model.h[i].compile(fullgraph=True, **options)
    return model


class Block(nn.Sequential):
    """A small one: compiling takes the time of these tests."""

    def __init__(self, width=8):
        super().__init__(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x):
        return x + super().forward(x)


class Model(nn.Module):
    def __init__(self, apply=lambda block, x: block(x)):
        super().__init__()
        self.wte, self.h, self.norm = (
            nn.Embedding(96, 8),
            nn.ModuleList([Block(), Block()]),
            nn.LayerNorm(8),
        )
        self.apply_block = apply

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.h:
            x = self.apply_block(block, x)
        return self.norm(x)


def checkpointing():
    return Model(partial(checkpoint, use_reentrant=False))


def trained(model, ids, compiled, num_steps, measured=lambda step: False, *, is_prepared=True):
    """The `Geometry` of the measured steps of a model, the graphs of its run and how many of them
    run in each step.
    """
    torch._dynamo.reset()
    counters.clear()
    backend, geometry = (
        CountingBackend("aot_eager"),
        Geometry(model, metrics=moments, no_grad_passes=False),
    )
    if is_prepared:
        geometry.probe.prepare(model)
        geometry.probe.is_stable = True
    run, optimizer = compiled(model, backend=backend), torch.optim.SGD(model.parameters(), 1e-2)
    runs = []
    for i in range(num_steps):
        before = backend.runs
        if measured(i):
            geometry.probe.forget_weights()
            geometry.probe.attach()
        run(ids).square().mean().backward()
        geometry.probe.detach()
        optimizer.step()
        optimizer.zero_grad()
        runs.append(backend.runs - before)
    assert not counters["graph_break"]
    return geometry, counters["stats"]["unique_graphs"], runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "compiled", "graphs_a_step"),
    [
        (Model, whole, 1),
        (Model, checkpointed_blocks, 2),
        (checkpointing, blocks_in_place, 4),
    ],
)
def test_measured_and_other_steps_run_the_graphs_of_a_model_that_is_not_prepared(
    make, compiled, graphs_a_step
):
    plain, ids = make(), torch.randint(0, 96, (2, 6))
    measured = copy.deepcopy(plain)
    num_steps = 4
    _, graphs, runs = trained(plain, ids, compiled, num_steps, is_prepared=False)
    geometry, *of_measured = trained(measured, ids, compiled, num_steps, lambda i: i % 2)
    assert of_measured == [graphs, runs]
    assert set(runs) == {graphs_a_step}
    # those with activation checkpointing, too, of which blocks run once more in the backward pass
    assert [values["n"] for values in geometry.compute().values()] == [num_steps // 2 * 12] * 4
    assert all(map(torch.equal, plain.parameters(), measured.parameters()))


@pytest.mark.slow
def test_a_stable_probe_reads_the_rows_that_an_eager_one_reads():
    model, batch = albert(num_hidden_layers=2), token_batch()
    with observe(model, metrics=moments) as expected:
        model(**batch)
    geometry = Geometry(model, metrics=moments)
    geometry.probe.prepare(model)
    geometry.probe.is_stable = True
    with geometry.probe:
        torch.compile(model, backend="eager")(**batch)
    # also V_W_unbiased, by token ids, and n, by the mask
    assert geometry.compute() == expected.compute()


@pytest.mark.parametrize("again", [True, False])
def test_a_pass_that_raises_counts_nowhere_for_a_stable_probe(again):
    model, ids = Model(), torch.randint(0, 96, (2, 6))
    geometry = Geometry(model, metrics=moments)
    geometry.probe.prepare(model)
    geometry.probe.is_stable = True
    with geometry.probe:
        model(ids)
        model.apply_block, apply = (lambda block, x: model.norm(block(x), 1)), model.apply_block
        with pytest.raises(TypeError):
            model(ids)
        model.apply_block = apply
        if again:
            model(ids)
    assert [values["n"] for values in geometry.compute().values()] == [24 if again else 12] * 4
