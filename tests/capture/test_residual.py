"""The residual ledger at the blocks of every model family, against float64 sums of the block's own
input and output.
"""

import copy
from functools import cache

import pytest
import torch
import transformers as hf
from torch import nn

from embedgeo import GeometryMonitor, Residual, StepMonitor, TokenMoments, describe, observe
from embedgeo.capture.layers import resolve_layers
from embedgeo.layer_names import PARTS
from tests.models import (
    DECODERS,
    FAMILIES,
    PAD,
    VOCABULARY,
    NanoGPT,
    TorchEncoder,
    checkpoint_activations,
    gpt_neox,
    t5,
    token_batch,
)

_MOE = {
    "experts_implementation": "eager",
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "num_key_value_heads": 2,
}
_SSM = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 3}
_NAMED = [
    *DECODERS,
    "bert",
    "roberta",
    "distilbert",
    "deberta_v2",
    "modernbert",
    "t5 encoder",
]


def _torch_encoder(norm_first):
    model = TorchEncoder()
    block = nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    model.encoder = nn.TransformerEncoder(block, 3, enable_nested_tensor=False)
    return model


BUILD = {
    **{name: FAMILIES[name].build for name in _NAMED},
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**_MOE, **_SSM, num_attention_heads=2, intermediate_size=32)
    ),
    "nemotron": lambda: hf.NemotronForCausalLM(
        hf.NemotronConfig(
            **_SSM, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32
        )
    ),
    "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(**_SSM)),
    "nanoGPT": NanoGPT,
    "torch, norm first": lambda: _torch_encoder(True),
    "torch, norm last": lambda: _torch_encoder(False),
    "parallel": lambda: gpt_neox(use_parallel_residual=True),
    "sequential": lambda: gpt_neox(use_parallel_residual=False),
}


@cache
def built(name, dtype=torch.float64):
    """A model, built once: it must be left as it is."""
    torch.manual_seed(0)
    model = BUILD[name]().eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) / 10
    return model.to(torch.float32 if name == "mamba" else dtype)  # its stream is in float32


def run(model, ids):
    name = (
        "input_ids"
        if isinstance(model, hf.PreTrainedModel)
        else ("idx" if isinstance(model, NanoGPT) else "ids")
    )
    return model(**{name: ids})


def measured(model, ids, layers, **options):
    with (
        observe(model, layers, lambda dim: [TokenMoments(dim)], **options) as geometry,
        torch.no_grad(),
    ):
        run(model, ids)
    return geometry.compute()


POST_NORM = ["bert", "roberta", "distilbert", "deberta_v2", "torch, norm last"]
BLOCKS = ["block.00", "block.01", "block.02"]


def ledgers(values):
    """The ledgers of the blocks."""
    return {
        name.removesuffix(".ledger"): each
        for name, each in values.items()
        if name.endswith(".ledger")
    }


def assert_parts_add_up(values, expected, rtol):
    """Those of a block, to its own moments."""
    for key in ("Q", "M", "V", "V_W", "V_W_unbiased"):
        parts = [value for each, value in values.items() if each.startswith(f"{key}_from_")]
        assert sum(parts) == pytest.approx(values[key], abs=rtol * values["Q"])
        assert values[key] == pytest.approx(expected[key], abs=rtol * values["Q"]), key
        shares = [value for each, value in values.items() if each.startswith(f"{key}_share_")]
        assert sum(shares) == pytest.approx(1)


def assert_described_as_measured(name):
    """Also of weights that are not there."""
    torch.manual_seed(0)
    model = BUILD[name]().eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) / 10
    found = measured(model, token_batch(2, 8)["input_ids"], "residual")
    for each in (model, copy.deepcopy(model).to("meta")):
        description = describe(GeometryMonitor(layers="residual"), each)
        assert {layer.name for layer in description.layers} == {*found}, name
        assert not any("residual" in warning for warning in description.warnings), name


def test_the_layers_that_are_described_are_those_measured():
    for name in ("parallel", "gpt2"):
        assert_described_as_measured(name)


@pytest.mark.slow
def test_of_every_family_the_layers_that_are_described_are_those_measured():
    for name in BUILD:
        assert_described_as_measured(name)


def test_why_streams_cannot_be_told_is_a_warning_and_all_are_described():
    model = nn.Sequential(nn.Embedding(20, 16), nn.Sequential(Gated(2.0), Gated(2.0)))
    description = describe(GeometryMonitor(layers="residual"), model)
    assert len(description.layers) == 2 * (len(PARTS) + 1)
    (warning,) = (each for each in description.warnings if "needs a block whose output" in each)
    assert "at layer 'block.00" in warning


def test_parts_add_up_to_the_blocks_own_moments():
    for name in BUILD:
        assert_ledgers_add_up(name)


def assert_ledgers_add_up(name):
    model, ids = built(name), token_batch()["input_ids"]
    expected, found = measured(model, ids, "blocks"), ledgers(measured(model, ids, "residual"))
    assert list(found) == BLOCKS, name
    # Mamba's stream is in float32
    eps = torch.finfo(torch.float32 if name == "mamba" else torch.float64).eps
    for layer, values in found.items():
        assert_parts_add_up(values, expected[layer], max(1e-9, 10 * eps))
        writes = {"Q_from_other"} if name == "mamba" else {"Q_from_attention", "Q_from_mlp"}
        assert writes <= values.keys(), name
        assert ("Q_from_norm_bias" in values) == (name in POST_NORM), name
        assert abs(values["Q_from_rounding"]) < 100 * eps * values["Q"]


def _block(model, layer):
    (found,) = resolve_layers(model, layer)
    return found.calls[0].module


@pytest.mark.slow
def test_encoder_and_decoder_have_a_ledger_each_and_cross_attention_is_a_write():
    torch.manual_seed(0)
    model, ids = t5().double().eval(), token_batch()["input_ids"]
    with observe(model, "residual") as geometry, torch.no_grad():
        model(input_ids=ids, decoder_input_ids=ids[:, :7])
    values = geometry.compute()
    with observe(model, "blocks") as plain, torch.no_grad():
        model(input_ids=ids, decoder_input_ids=ids[:, :7])
    expected = plain.compute()
    for layer, of_layer in ledgers(values).items():
        assert_parts_add_up(of_layer, expected[layer], 1e-9)
    assert {
        "decoder.block.01.attention",
        "decoder.block.01.other",
        "decoder.block.01.mlp",
    } <= values.keys()
    assert "encoder.block.01.other" not in values
    assert "Q_from_other" not in values["encoder.block.01.ledger"]
    assert {"Q_from_attention", "Q_from_other", "Q_from_mlp"} <= values[
        "decoder.block.01.ledger"
    ].keys()


WRITTEN = {
    "gpt_neox": ("attention", "mlp"),
    "gpt2": ("attn", "mlp"),
    "llama": ("self_attn", "mlp"),
    "gemma2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "opt": ("self_attn", "fc2"),
    "bert": ("attention.output.dense", "output.dense"),
    "torch, norm first": ("self_attn", "linear2"),
}
"""Modules of a block whose output attention and MLP write."""


def test_layers_inside_are_what_modules_write():
    for name in WRITTEN:
        assert_written(name)


def assert_written(name):
    model, ids = built(name), token_batch()["input_ids"]
    written, found = dict(zip(WRITTEN[name], ("attention", "mlp"), strict=True)), {}
    with (
        observe(
            model,
            lambda inner: {
                layer: _block(model, "block.01").get_submodule(p) for p, layer in written.items()
            },
            lambda dim: [TokenMoments(dim)],
        ) as geometry,
        torch.no_grad(),
    ):
        run(model, ids)
    found = measured(model, ids, "residual")
    for layer, values in geometry.compute().items():
        expected = {key: values[key] for key in ("n", "Q", "M", "V", "V_W")}
        of_layer = found[f"block.01.{layer}"]
        assert {key: of_layer[key] for key in expected} == pytest.approx(expected, rel=1e-9)


ZERO = {
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "gpt_neox": ("attention.dense", "mlp.dense_4h_to_h"),
    "bloom": ("self_attention.dense", "mlp.dense_4h_to_h"),
    "bert": ("attention.output.dense", "output.dense"),
    "t5 encoder": ("layer.0.SelfAttention.o", "layer.1.DenseReluDense.wo"),
}
"""The last projections of attention and MLP."""


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("name", ZERO)
def test_a_write_that_is_zero_keeps_its_name(name, which):
    model, ids = copy.deepcopy(built(name)), token_batch()["input_ids"]
    for i in which:
        for parameter in _block(model, "block.01").get_submodule(ZERO[name][i]).parameters():
            parameter.data.zero_()
    found = measured(model, ids, "residual")
    for i, write in enumerate(("attention", "mlp")):
        assert (found[f"block.01.{write}"]["Q"] == 0) == (i in which)
        assert found[f"block.00.{write}"]["Q"] > 0
        assert (f"Q_from_{write}" in found["block.01.ledger"]) == (i not in which)


class Mixed(nn.Module):
    """A block whose modules have names of their own."""

    def __init__(self):
        super().__init__()
        self.mix, self.dense, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        x = x + self.mix(self.norm(x))
        return x + self.dense(self.norm(x))


class Gated(nn.Module):
    """A block whose attention writes little, and is multiplied by a gate that is no module."""

    def __init__(self, gate):
        super().__init__()
        self.self_attn, self.mlp, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.gate = gate
        for parameter in self.self_attn.parameters():
            parameter.data /= 16

    def forward(self, x):
        x = x + self.gate * self.self_attn(self.norm(x))
        return x + self.mlp(self.norm(x))


def _stacked(*blocks):
    torch.manual_seed(0)
    return nn.ModuleDict({"layers": nn.Sequential(*blocks)})


def _moments_of(model, layers, x):
    make = lambda dim: [TokenMoments(dim)]  # noqa: E731
    with observe(model, layers, make, mask=torch.ones(x.shape[:2])) as geometry, torch.no_grad():
        model["layers"](x)
    return geometry.compute()


def test_a_gate_outside_of_a_module_is_refused_by_name():
    x = torch.randn(8, 64, 16, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        model = _stacked(Gated(0.5), Gated(0.5)).to(dtype)
        with pytest.raises(ValueError, match="what 'self_attn' writes is not what is added"):
            _moments_of(model, "residual", x.to(dtype))
        found = _moments_of(_stacked(Gated(1.0), Gated(1.0)).to(dtype), "residual", x.to(dtype))
        assert found["block.01.attention"]["Q"] < found["block.01.mlp"]["Q"] / 10


SMALL = {**_SSM, "num_attention_heads": 2, "intermediate_size": 32}
HEADS = {**SMALL, "num_key_value_heads": 2}
NAMES = {
    "GptOss": (
        {
            **HEADS,
            "head_dim": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "pad_token_id": PAD,
            "layer_types": ["full_attention"] * 3,
        },
        ["attention mlp"] * 3,
    ),
    "Lfm2": (
        {**HEADS, "layer_types": ["conv", "full_attention", "conv"]},
        ["other mlp", "attention mlp", "other mlp"],
    ),
    "RecurrentGemma": ({**SMALL, "lru_width": 16, "pad_token_id": PAD}, ["other mlp"] * 3),
    "FNet": (
        {
            **_SSM,
            "intermediate_size": 32,
            "pad_token_id": PAD,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        ["other mlp"] * 3,
    ),
    "Rwkv": (
        {**_SSM, "attention_hidden_size": 16, "intermediate_size": 32, "context_length": 32},
        ["attention mlp"] * 3,
    ),
    "NemotronH": (
        {
            **HEADS,
            "layers_block_type": ["mamba", "attention", "mamba"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 4,
            "n_groups": 2,
        },
        ["other", "attention", "other"],
    ),
}
"""Settings of a family, and what its blocks write."""


@pytest.mark.parametrize("name", NAMES)
def test_writes_are_named_by_whole_words_of_their_modules_names(name):
    settings, expected = NAMES[name]
    torch.manual_seed(0)
    model = getattr(hf, f"{name}Model")(getattr(hf, f"{name}Config")(**settings)).eval()
    found = measured(model, token_batch()["input_ids"], "residual")
    for block, writes in zip(BLOCKS, expected, strict=True):
        of_block = {layer for layer in found if layer.startswith(block)}
        assert of_block - {f"{block}.middle", f"{block}.ledger"} == {
            f"{block}.{each}" for each in writes.split()
        }


def test_writes_are_named_as_they_are_given():
    x = torch.randn(8, 64, 16, generator=torch.Generator().manual_seed(0))
    model = _stacked(Mixed(), Mixed())
    given = Residual(writes={"attention": "layers.*.mix", "mlp": "layers.*.dense"})
    plain, found = _moments_of(model, "residual", x), _moments_of(model, ["blocks", given], x)
    assert plain.keys() == {
        "block.00.other",
        "block.00.ledger",
        "block.01.other",
        "block.01.ledger",
    }
    assert found.keys() == {
        *("embed", "block.00", "block.01"),
        *(
            f"block.0{i}.{name}"
            for i in (0, 1)
            for name in ("attention", "mlp", "middle", "ledger")
        ),
    }
    with torch.no_grad():
        first = model["layers"][0]
        expected = first.mix(first.norm(x)).square().sum(-1).mean()
    assert found["block.00.attention"]["Q"] == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(ValueError, match="what 'mix' writes is not what is added"):
        _moments_of(model, Residual(writes={"attention": "layers.*.mix"}), x)
    with pytest.raises(ValueError, match=r"matches no layer .* Close to it: layers.00.mix"):
        _moments_of(model, Residual(writes={"attention": "layers.*.mixx"}), x)
    with pytest.raises(ValueError, match=r"attention, mlp or other; got \['experts'\]"):
        Residual(writes={"experts": "layers.*.mix"})


def test_padding_and_first_positions_are_left_out():
    model, batch = built("gpt2"), token_batch(padding="left")
    with observe(model, ["blocks"], skip_first_positions=1) as plain, torch.no_grad():
        model(**batch)
    with observe(model, ["residual"], skip_first_positions=1) as ledger, torch.no_grad():
        model(**batch)
    blocks, found = plain.compute(), ledgers(ledger.compute())
    for layer, values in found.items():
        assert values["n"] == blocks[layer]["n"] < batch["input_ids"].numel()
        assert values["Q"] == pytest.approx(blocks[layer]["Q"], rel=1e-9)


def test_what_has_no_ledger_is_refused():
    with pytest.raises(ValueError, match=r"block\.00 is applied several times"):
        observe(FAMILIES["albert"].build(), "residual").__enter__()
    with pytest.raises(ValueError, match='rows="max"'):
        observe(built("llama"), "residual", rows="max").__enter__()
    model = FAMILIES["opt"].build(dropout=0.5).train()  # its dropout is no module
    with (
        pytest.raises(ValueError, match="a dropout that is no module") as caught,
        observe(model, "residual"),
    ):
        model(**token_batch())
    assert "at layer 'block.00.ledger'" in caught.value.__notes__


def history(*, checkpoints):
    torch.manual_seed(0)
    model = gpt_neox(use_parallel_residual=False, hidden_dropout=0.1).train()
    if checkpoints:
        checkpoint_activations(model, False)
    monitor = StepMonitor(model, 1, layers="residual", metrics=lambda dim: [TokenMoments(dim)])
    for step in range(2):
        batch = token_batch(seed=step)
        with monitor.step(step, batch):
            model(**batch, labels=batch["input_ids"]).loss.backward()
    monitor.close()
    return repr(monitor.history)


def test_a_model_that_checkpoints_its_activations_has_the_same_ledger():
    assert history(checkpoints=True) == history(checkpoints=False)
