"""Layers that are the output of a norm, told by its weights and their rows."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from embedgeo import EmbeddingMoments, Geometry, observe
from tests.data import generator
from tests.models import FAMILIES, NanoGPT, TorchEncoder, eval_model, token_batch
from tests.training.runs import random_state

POST = {"bert", "roberta", "distilbert", "albert", "albert in groups", "deberta_v2"}
BOTH = {"t5", "bert to gpt2"}


class Scale(nn.Module):
    """A weight of the width, as a norm has, and no norm."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x


class Renamed(nn.Module):
    """An RMSNorm whose weight has another name."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.gain * x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


def drawn(module, seed=0):
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.add_(
                0.3
                * torch.randn(parameter.shape, generator=generator(seed + i)).to(parameter.dtype)
            )
    return module


def observed(model, **batch):
    with torch.no_grad(), observe(model, metrics=lambda dim: [EmbeddingMoments(dim)]) as geometry:
        model(**batch) if batch else model(token_batch()["input_ids"])
    return geometry, {
        layer: at for layer, at in geometry.compute().items() if "norm_Q_expected" in at
    }


def expected_size(module, width, dtype=torch.float32):
    """``norm_Q_expected`` of a module's output; None where it is no norm's."""
    rows = torch.randn(2, 40, width, generator=generator(1)).mul(3).add(1).to(dtype)
    with (
        torch.no_grad(),
        observe(
            module,
            lambda model: {"of a module": model},
            lambda dim: [EmbeddingMoments(dim)],
            mask=torch.ones(2, 40),
        ) as geometry,
    ):
        module(rows)
    return geometry.compute()["of a module"].get("norm_Q_expected")


@pytest.mark.parametrize(("width", "dtype"), [(16, torch.bfloat16), (33, torch.float32)])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm, LlamaRMSNorm, GemmaRMSNorm])
def test_Q_expected_of_a_norm_is_what_its_weights_say(kind, width, dtype):  # noqa: N802
    norm = drawn(kind(width).to(dtype))
    weight, *bias = (parameter.detach().double() for parameter in norm.parameters())
    gain = 1 + weight if kind is GemmaRMSNorm else weight
    want = sum(float(each.square().sum()) for each in (gain, *bias))
    assert expected_size(norm, width, dtype) == pytest.approx(want, rel=1e-9)


def test_other_modules_are_no_norms_and_none_is_run_to_tell():
    counted = nn.BatchNorm1d(40)
    others = [nn.Linear(40, 40), nn.GELU(), nn.PReLU(40), counted, Scale(40), Renamed(40)]
    state = random_state()
    for module in map(drawn, others):
        assert expected_size(module, 40) is None
    assert counted.num_batches_tracked == 1
    assert torch.get_rng_state().equal(state[0])
    assert random_state()[1:] == state[1:]


def test_the_architecture_of_a_model_and_its_norms_are_found():
    for name in FAMILIES.keys() - BOTH - {"jamba"}:
        geometry, norms = observed(drawn(copy.deepcopy(eval_model(name))), **token_batch())
        architecture = geometry.norms.architecture(geometry.layers)
        assert architecture == ("post-ln" if name in POST else "pre-ln"), name
        expected = {"block.00", "block.01", "block.02"} if name in POST else {"final_norm"}
        assert norms.keys() - {"embed"} == expected, name
        assert ("embed" in norms) == (
            name in POST - {"albert", "albert in groups"} or name in ("bloom", "modernbert")
        ), name


def test_models_written_by_hand():
    geometry, norms = observed(drawn(NanoGPT().eval()))
    assert geometry.norms.architecture(geometry.layers) == "pre-ln"
    assert norms.keys() == {"final_norm"}
    geometry, norms = observed(drawn(TorchEncoder().train()))
    assert geometry.norms.architecture(geometry.layers) == "post-ln"
    assert norms.keys() == {"block.00", "block.01", "block.02", "final_norm"}


def test_the_norms_of_a_block_are_told_apart_once_a_training_has_made_them_different():
    model = FAMILIES["bert"].build().eval()
    geometry = Geometry(model, metrics=lambda dim: [EmbeddingMoments(dim)])
    for weights_change in (False, True):
        if weights_change:
            drawn(model)
        with torch.no_grad(), geometry.probe:
            model(**token_batch())
        found = geometry.compute()
        geometry.reset()
        for i, block in enumerate(model.bert.encoder.layer):
            expected = sum(
                float(each.detach().double().square().sum())
                for each in block.output.LayerNorm.parameters()
            )
            assert found[f"block.{i:02d}"]["norm_Q_expected"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["bloom", "modernbert"])
def test_rows_that_are_small_beside_epsilon_before_the_norm_are_its_output_all_the_same(name):
    model = FAMILIES[name].build().eval()  # an initial standard deviation of 0.02, and ε = 1e-5
    norm = (
        model.transformer.word_embeddings_layernorm
        if name == "bloom"
        else model.model.embeddings.norm
    )
    for weights_change in (False, True):
        if weights_change:
            drawn(norm)
        _, norms = observed(model, **token_batch())
        expected = sum(float(each.detach().double().square().sum()) for each in norm.parameters())
        assert norms["embed"]["norm_Q_expected"] == pytest.approx(expected, rel=1e-9)
        assert norms["embed"]["Q"] < 0.99 * expected or weights_change
