"""What a stable probe reads in the graphs of torch.compile, and that these are the graphs of
training without it.
"""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from embedgeo import Geometry, observe
from tests.compiled import CountingBackend
from tests.models import albert, gpt_neox, token_batch
from tests.training.runs import Breaks, moments

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


def compiled_step(model, **options):
    def run(ids):
        return model(ids)

    return torch.compile(run, fullgraph=True, **options)


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
        (Model, compiled_step, 1),
        (Model, blocks_in_place, 2),
        (Model, checkpointed_blocks, 2),
        (checkpointing, whole, 1),
        (checkpointing, blocks_in_place, 4),
    ],
)
def test_measured_and_other_steps_run_the_graphs_of_a_model_that_is_not_prepared(
    make, compiled, graphs_a_step
):
    plain, ids = make(), torch.randint(0, 96, (2, 6))
    measured = copy.deepcopy(plain)
    num_steps = 100 if (make, compiled) == (Model, whole) else 4
    _, graphs, runs = trained(plain, ids, compiled, num_steps, is_prepared=False)
    geometry, *of_measured = trained(measured, ids, compiled, num_steps, lambda i: i % 2)
    assert of_measured == [graphs, runs]
    assert set(runs) == {graphs_a_step}
    # those with activation checkpointing, too, of which blocks run once more in the backward pass
    assert [values["n"] for values in geometry.compute().values()] == [num_steps // 2 * 12] * 4
    assert all(map(torch.equal, plain.parameters(), measured.parameters()))


@pytest.mark.parametrize(
    ("compiled", "is_first"), [(whole, True), (whole, False), (checkpointed_blocks, False)]
)
@torch._dynamo.config.patch(error_on_recompile=False)
@pytest.mark.slow
def test_graphs_of_another_model_of_the_class_do_not_run_in_place_of_a_prepared_one(
    compiled, is_first
):
    model, other, ids = Model(), Model(), torch.randint(0, 96, (2, 6))
    geometry = Geometry(model, metrics=moments)
    geometry.probe.prepare(model)
    geometry.probe.is_stable = True
    run, run_other = (compiled(each, backend="eager") for each in (model, other))
    for of_prepared in (is_first, not is_first, is_first):
        if of_prepared:
            with geometry.probe:
                run(ids)
        else:
            run_other(ids)
    assert [values["n"] for values in geometry.compute().values()] == [
        12 * (2 if is_first else 1)
    ] * 4


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt_neox, albert])
def test_a_stable_probe_reads_the_rows_that_an_eager_one_reads(make):
    model, batch = make(num_hidden_layers=1 if make is gpt_neox else 2), token_batch()
    with observe(model, metrics=moments) as expected:
        model(**batch)
    geometry = Geometry(model, metrics=moments)
    geometry.probe.prepare(model)
    geometry.probe.is_stable = True
    with geometry.probe:
        torch.compile(model, backend="eager")(**batch)
    # also V_W_unbiased, by token ids, and n, by the mask
    assert geometry.compute() == expected.compute()


@pytest.mark.slow
def test_a_pass_without_gradients_does_not_count_and_an_exclusive_probe_runs_eagerly():
    model, ids = Model(), torch.randint(0, 96, (2, 6))
    geometry = Geometry(model, metrics=moments, no_grad_passes=False)
    geometry.probe.prepare(model)
    geometry.probe.is_stable = True

    @torch.compile(backend="aot_eager", fullgraph=True)
    def both(ids):
        with torch.no_grad():
            reference = model(ids)
        return (model(ids) - reference).square().mean()

    with geometry.probe:
        both(ids).backward()
        with geometry.probe.exclusive():  # as of the batches of a probe: eagerly
            assert eval_frame._stance.stance == "force_eager"
        assert eval_frame._stance.stance == "default"
    assert [values["n"] for values in geometry.compute().values()] == [12] * 4
    assert geometry.probe.layers_without_gradients == {layer.name for layer in geometry.layers}


def test_copies_and_pickles_of_a_prepared_model_are_not_read_and_its_state_is_as_before():
    model, ids = Model(), torch.randint(0, 96, (2, 6))
    names = [*model.state_dict()], [name for name, _ in model.named_buffers()]
    geometry = Geometry(model, metrics=moments)
    for _ in range(2):
        geometry.probe.prepare(model)
    geometry.probe.is_stable = True
    assert [len(block._forward_hooks) + len(block._forward_pre_hooks) for block in model.h] == [
        2,
        2,
    ]
    assert ([*model.state_dict()], [name for name, _ in model.named_buffers()]) == names
    model.apply_block = None
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with geometry.probe:
        for other in others:
            other.apply_block = Block.__call__
            assert not Geometry(other).probe.is_prepared()
            other(ids)
    assert geometry.records() == []
    prepared = Geometry(others[0], metrics=moments).probe
    prepared.prepare(others[0])
    assert prepared.is_prepared()
    assert [len(block._forward_hooks) + len(block._forward_pre_hooks) for block in others[0].h] == [
        2,
        2,
    ]


@pytest.mark.slow
def test_an_error_of_a_listener_has_the_name_of_the_layer():
    model, errors = Model(), []
    geometry = Geometry(model, metrics=lambda dim: [Breaks(dim)], on_error=errors.append)
    geometry.probe.prepare(model)
    geometry.probe.is_stable = True
    with geometry.probe:
        torch.compile(model, backend="aot_eager")(torch.randint(0, 96, (2, 6)))
    assert errors[0].__notes__ == ["in Breaks", "at layer 'embed'"]
