import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from embedgeo import observe
from embedgeo.capture.layers import resolve_layers
from embedgeo.capture.structure import module_names
from tests.models import gpt_neox, token_batch


def names(layers):
    return [layer.name for layer in layers]


def test_wrappers_change_neither_names_nor_modules():
    model = gpt_neox()
    plain = {layer.name: layer.calls for layer in resolve_layers(model, ["blocks", "*.mlp"])}
    blocks = model.gpt_neox.layers
    for i, block in enumerate(blocks):
        blocks[i] = checkpoint_wrapper(block)
    blocks[1] = torch.compile(blocks[1], backend="eager")
    wrapped = nn.ModuleDict({"inner": torch.compile(model, backend="eager")})
    assert {
        layer.name: layer.calls for layer in resolve_layers(wrapped, ["blocks", "*.mlp"])
    } == plain
    with observe(wrapped["inner"]), torch.no_grad():  # which Python takes for empty
        model(**token_batch())


def test_module_names_are_relative_to_the_hugging_face_model_and_zero_padded():
    model = gpt_neox(num_hidden_layers=12)
    inside = nn.ModuleDict({"student": model})
    assert list(module_names(inside)) == list(module_names(model))
    assert "gpt_neox.layers.03.mlp" in module_names(model)
    assert names(resolve_layers(inside))[:3] == ["embed", "block.00", "block.01"]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("*.mlp", [f"gpt_neox.layers.0{i}.mlp" for i in range(3)]),
        ("gpt_neox.layers.1.attention", ["gpt_neox.layers.01.attention"]),
        ("block.0[12]", ["block.01", "block.02"]),
        (["embed", "final_norm"], ["embed", "final_norm"]),
        (["block.01", "block.*"], ["block.01", "block.00", "block.02"]),
        ("mean(last2)", ["mean(last2)"]),
        ("hidden_states", [f"hidden.0{i}" for i in range(4)]),
        (
            ["hidden_states", "mean(last2)", "hidden.*"],
            [*(f"hidden.0{i}" for i in range(4)), "mean(last2)"],
        ),
        (lambda model: {"head": model.get_output_embeddings()}, ["head"]),
        (lambda model: ["embed", lambda inner: "block.02"], ["embed", "block.02"]),
    ],
)
def test_layers_may_be_patterns_lists_and_callables(layers, expected):
    assert names(resolve_layers(gpt_neox(), layers)) == expected


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ("*.mpl", ValueError, r"matches no layer.*mlp"),
        ("mean(last9)", ValueError, "at most all; the model has 3"),
        ([], ValueError, "at least one layer"),
        (7, TypeError, "int"),
        (lambda model: {"x": 3}, TypeError, "int for 'x'"),
    ],
)
def test_layers_that_cannot_be_resolved(layers, error, message):
    with pytest.raises(error, match=message):
        resolve_layers(gpt_neox(), layers)


def test_patterns_find_a_models_own_modules_before_numbered_hidden_states():
    model = nn.ModuleDict({"hidden": nn.ModuleList(nn.LayerNorm(2) for _ in range(2))})
    assert [layer.calls[0].module for layer in resolve_layers(model, "hidden.*")] == list(
        model["hidden"]
    )
    assert len(resolve_layers(model, "*")) == 6  # embed, two blocks, their list and its modules
    assert [layer.takes_input for layer in resolve_layers(model, "hidden_states")] == [
        True,
        False,
        False,
    ]
