"""Layers that are the output of a norm, found by running it."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from embedgeo import EmbeddingMoments, Geometry, observe
from embedgeo.capture.layers import resolve_layers
from embedgeo.capture.norms import Norms, as_norm
from tests.data import generator
from tests.models import FAMILIES, NanoGPT, TorchEncoder, token_batch
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


class OnMPS(torch.Tensor):
    """On a device without float64."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.cpu:
            return result.as_subclass(torch.Tensor)
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            raise TypeError("it has no float64")
        return result


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 33])
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


def expected_size(norms, layer, *seen):
    norms.reset()
    norms.look(layer, *seen)
    return norms.expected_size(layer)


def test_they_are_found_on_a_device_without_float64():
    block = nn.Sequential(nn.Linear(8, 8), drawn(nn.LayerNorm(8)))
    hidden = block(torch.randn(3, 8, generator=generator(1)))
    expected = block[1].weight.double().square().sum() + block[1].bias.double().square().sum()
    for name, weight in [*block[1].named_parameters()]:
        setattr(block[1], name, nn.Parameter(weight.detach().as_subclass(OnMPS)))
    (layer,) = resolve_layers(nn.ModuleDict({"block": block}), "block")
    assert expected_size(Norms(block), layer, hidden.detach().as_subclass(OnMPS)) == pytest.approx(
        expected.item()
    )


def test_a_norm_without_weights_expects_the_width():
    assert float(
        as_norm(nn.LayerNorm(12, elementwise_affine=False), 12).expected_size
    ) == pytest.approx(12, rel=1e-6)


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - BOTH - {"jamba"}))
def test_the_architecture_of_a_model_and_its_norms_are_found(name):
    model = drawn(FAMILIES[name].build().eval())
    geometry, norms = observed(model, **token_batch())
    assert geometry.norms.architecture(geometry.layers) == ("post-ln" if name in POST else "pre-ln")
    expected = {"block.00", "block.01", "block.02"} if name in POST else {"final_norm"}
    assert norms.keys() - {"embed"} == expected
    assert ("embed" in norms) == (
        name in POST - {"albert", "albert in groups"} or name in ("bloom", "modernbert")
    )


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


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_with_equal_weights_Q_is_what_is_expected(family):  # noqa: N802
    _, norms = observed(FAMILIES[family].build().eval(), **token_batch())
    for at in norms.values():
        assert at["Q"] == pytest.approx(at["norm_Q_expected"], rel=1e-2)
        assert at["norm_Q_expected"] == pytest.approx(16, rel=1e-9)


def test_models_written_by_hand():
    geometry, norms = observed(drawn(NanoGPT().eval()))
    assert geometry.norms.architecture(geometry.layers) == "pre-ln"
    assert norms.keys() == {"final_norm"}
    geometry, norms = observed(drawn(TorchEncoder().train()))
    assert geometry.norms.architecture(geometry.layers) == "post-ln"
    assert norms.keys() == {"block.00", "block.01", "block.02", "final_norm"}


@pytest.mark.parametrize("rows", ["mean", "max"])
def test_what_is_made_of_several_rows_is_no_norm_s_output(
    rows,
):
    model = FAMILIES["bert"].build().eval()
    with torch.no_grad(), observe(model, ["blocks", "mean(last2)"], rows=rows) as geometry:
        model(**token_batch())
    assert not any("norm_Q_expected" in at for at in geometry.compute().values())
    assert geometry.norms.architecture(geometry.layers) == "post-ln"


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


def test_modules_that_are_far_from_a_layer_s_norm_are_run_once(monkeypatch):
    model, run = FAMILIES["gpt_neox"].build().eval(), []
    forward = nn.LayerNorm.forward

    def noted(norm, rows):
        if len(rows) == 1:  # not of the model's own forward pass
            run.append(norm)
        return forward(norm, rows)

    monkeypatch.setattr(nn.LayerNorm, "forward", noted)
    geometry = Geometry(model, metrics=lambda dim: [EmbeddingMoments(dim)])
    for _ in range(2):
        run.clear()
        with torch.no_grad(), geometry.probe:
            model(**token_batch())
        geometry.compute()
        geometry.reset()
    assert set(run) == {model.gpt_neox.final_layer_norm}


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


@pytest.mark.parametrize("size", [0.02, 0.9])
def test_rows_of_mean_zero_are_no_norm_s_output_for_that_alone(size):
    model = FAMILIES["gpt2"].build().eval()
    with torch.no_grad():
        model.transformer.wpe.weight.zero_()
        table = model.transformer.wte.weight
        table.sub_(table.mean(1, keepdim=True)).mul_(
            size / table.square().mean(1, keepdim=True).sqrt()
        )
    assert observed(model, **token_batch())[1].keys() == {"final_norm"}


def test_blocks_that_add_nothing_to_what_a_norm_gave_them_are_no_norms_for_their_epsilon():
    model = FAMILIES["bloom"].build().eval()
    with torch.no_grad():
        for block in model.transformer.h:
            for written in (block.self_attention.dense, block.mlp.dense_4h_to_h):
                written.weight.zero_()
    geometry, norms = observed(model, **token_batch())
    assert norms.keys() == {"embed", "final_norm"}
    assert geometry.norms.architecture(geometry.layers) == "pre-ln"


@pytest.mark.parametrize("is_masked", [True, False])
def test_a_norm_is_found_after_a_measurement_without_rows_that_count(is_masked):
    block = nn.Sequential(nn.Linear(8, 8), drawn(nn.LayerNorm(8)))
    (layer,) = resolve_layers(nn.ModuleDict({"block": block}), "block")
    hidden, norms = block(torch.randn(3, 8, generator=generator(1))).detach(), Norms(block)
    mask = torch.full((3,), not is_masked)
    assert (
        expected_size(norms, layer, torch.full_like(hidden, 0 if is_masked else torch.nan), mask)
        == 0
    )
    expected = sum(float(each.detach().double().square().sum()) for each in block[1].parameters())
    assert expected_size(norms, layer, hidden, ~mask if is_masked else mask) == pytest.approx(
        expected
    )


@pytest.mark.parametrize("padding", ["left", "right"])
def test_rows_that_do_not_count_and_are_set_to_zero_say_nothing(padding):
    model, batch = drawn(FAMILIES["deberta_v2"].build().eval()), token_batch(padding=padding)
    batch = {key: value.flip(0) for key, value in batch.items()}  # the first sequence is padded
    _, norms = observed(model, **batch)
    norm = model.deberta.embeddings.LayerNorm
    expected = sum(float(each.detach().double().square().sum()) for each in norm.parameters())
    assert norms["embed"]["norm_Q_expected"] == pytest.approx(expected, rel=1e-9)
