"""What is told of a forward pass in a torch that lacks the names by which it is told at once."""

import importlib.util
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from embedgeo.capture import torch_names


@pytest.fixture
def lacking(monkeypatch):
    """The module as it is in a torch without the private names; torch itself has them while it
    runs.
    """
    spec = importlib.util.find_spec("embedgeo.capture.torch_names")
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as without:
        without.delattr(torch._C, "_is_fwd_grad_enabled")
        without.delattr(torch._C, "_current_graph_task_id")
        spec.loader.exec_module(module)
    return module


class Told(nn.Module):
    """A block that keeps what each module tells in its forward passes."""

    def __init__(self, *tell):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.tell = tell
        self.told = []

    def forward(self, x):
        self.told.append([(names.has_gradients(), names.in_backward()) for names in self.tell])
        return self.layer(x)


WAYS = {
    "a plain pass": (lambda block, x: block(x), [(True, False)]),
    "reentrant": (
        lambda block, x: checkpoint(block, x, use_reentrant=True),
        [(True, False), (True, True)],
    ),
    "not reentrant": (
        lambda block, x: checkpoint(block, x, use_reentrant=False),
        [(True, False), (True, True)],
    ),
    "without gradients": (torch.no_grad()(lambda block, x: block(x)), [(False, False)]),
    "inference": (torch.inference_mode()(lambda block, x: block(x)), [(False, False)]),
}


@pytest.mark.parametrize("ends_with", ["backward", "grad"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_and_repetitions_are_told_without_private_names(lacking, way, ends_with):
    run, expected = WAYS[way]
    block = Told(torch_names, lacking)
    out = run(block, torch.ones(2, 3, requires_grad=True))
    if ends_with == "grad" and way == "reentrant":
        expected = expected[:1]  # torch refuses it
    elif out.requires_grad:
        out.sum().backward() if ends_with == "backward" else torch.autograd.grad(
            out.sum(), block.layer.weight
        )
    assert block.told == [[each, each] for each in expected]


def test_a_change_in_place_changes_the_version():
    x = torch.zeros(2)
    before = torch_names.version(x)
    assert torch_names.version(x) == before
    x.add_(1)
    assert torch_names.version(x) != before


def test_a_tensor_without_a_version_is_read_each_time():
    class WithoutVersion:
        def is_inference(self):
            return False

    x = WithoutVersion()
    assert torch_names.version(x) != torch_names.version(x)


@pytest.mark.parametrize("is_inference", [True, False])
def test_an_inference_tensor_has_no_version(is_inference):
    with torch.inference_mode() if is_inference else nullcontext():
        assert (torch_names.version(torch.zeros(2)) is None) == is_inference


def test_a_module_compiled_in_place_is_told():
    module = nn.Linear(2, 2)
    assert not torch_names.is_compiled_in_place(module)
    module.compile(backend="eager")
    assert torch_names.is_compiled_in_place(module)
    assert not torch_names.is_compiled_in_place(object())


def test_a_module_that_was_compiled_is_told():
    module = nn.Linear(2, 2)
    assert torch_names.is_compiled_wrapper(torch.compile(module, backend="eager"))
    assert not torch_names.is_compiled_wrapper(module)


def test_a_torch_without_the_parts_of_its_compiler_is_told_when_they_are_taken(monkeypatch):
    monkeypatch.delattr("torch._higher_order_ops.effects._register_effectful_op")
    with pytest.raises(ImportError, match="_register_effectful_op"):
        torch_names.in_graphs()
