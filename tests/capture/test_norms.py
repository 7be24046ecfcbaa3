"""Layers that are the output of a norm, found by running it."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from embedgeo import EmbeddingMoments, Geometry, observe
from embedgeo.capture.norms import as_norm
from tests.data import generator
from tests.models import FAMILIES, NanoGPT, TorchEncoder, eval_model, token_batch
from tests.training.runs import random_state

POST = {"bert", "roberta", "distilbert", "albert", "albert in groups", "deberta_v2"}
BOTH = {"t5", "bert to gpt2"}


class Renamed(nn.Module):
    """An RMSNorm under another name."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.gain * x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


class Scale(Renamed):
    def forward(self, x):
        return self.gain * x


class Noise(Renamed):
    def forward(self, x):
        return nn.functional.dropout(self.gain * x, 0.5) * random.random() * np.random.random()  # noqa: NPY002


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


@pytest.mark.parametrize(("width", "dtype"), [(16, torch.bfloat16), (33, torch.float32)])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm, LlamaRMSNorm, GemmaRMSNorm, Renamed])
def test_what_a_norm_does_is_what_its_weights_say(kind, width, dtype):
    norm = drawn(kind(width).to(dtype))
    weight, *bias = (parameter.detach().double() for parameter in norm.parameters())
    found = as_norm(norm, width)
    assert found.scale.equal(1 + weight if kind is GemmaRMSNorm else weight)
    assert found.shift.equal(bias[0] if bias else torch.zeros(width, dtype=torch.float64))


def test_other_modules_are_no_norms_and_are_not_run_where_that_may_change_something():
    others = [
        nn.Linear(8, 8),
        nn.Dropout(0.5),
        nn.GELU(),
        nn.PReLU(8),
        nn.BatchNorm1d(8),
        Scale(8),
        nn.Embedding(8, 8),
    ]
    others = [*map(drawn, others), Noise(8), nn.LazyLinear(8)]
    state = random_state()
    for module in others:
        assert as_norm(module, 8) is None
    assert as_norm(nn.LayerNorm(8), 16) is None
    assert as_norm(nn.LayerNorm(8, device="meta"), 8) is None
    assert others[4].num_batches_tracked == 0
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


def test_Q_expected_is_the_formula_of_the_layer_s_own_norm():  # noqa: N802 - as it is called
    bert, neox, gemma = (
        drawn(FAMILIES[name].build().eval()) for name in ("bert", "gpt_neox", "gemma2")
    )
    _, of_bert = observed(bert, **token_batch())
    for i, block in enumerate(bert.bert.encoder.layer):
        norm = block.output.LayerNorm
        want = norm.weight.double().square().sum() + norm.bias.double().square().sum()
        assert of_bert[f"block.{i:02d}"]["norm_Q_expected"] == pytest.approx(want.item(), rel=1e-9)
    norm = neox.gpt_neox.final_layer_norm
    want = norm.weight.double().square().sum() + norm.bias.double().square().sum()
    assert observed(neox, **token_batch())[1]["final_norm"]["norm_Q_expected"] == pytest.approx(
        want.item(), rel=1e-9
    )
    want = (1 + gemma.model.norm.weight.double()).square().sum()
    assert observed(gemma, **token_batch())[1]["final_norm"]["norm_Q_expected"] == pytest.approx(
        want.item(), rel=1e-9
    )


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
