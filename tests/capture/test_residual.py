"""The residual ledger at the blocks of every model family, against float64 sums of the block's own
input and output.
"""

from contextlib import nullcontext

import pytest
import torch
import transformers as hf
from torch import nn

from embedgeo import GeometryMonitor, StepMonitor, TokenMoments, observe
from embedgeo.capture.layers import resolve_layers
from tests.models import (
    FAMILIES,
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
    "gpt_neox",
    "bloom",
    "gpt2",
    "gptj",
    "llama",
    "mistral",
    "qwen2",
    "gemma2",
    "olmo2",
    "opt",
    "falcon",
    "phi",
    "bert",
    "roberta",
    "distilbert",
    "deberta_v2",
    "modernbert",
    "t5 encoder",
]


_HF = ("self_attn", "mlp", ("post_attention_layernorm", "input"))
_BERT = ("attention.output.dense", "output.dense", ("attention.output.LayerNorm", "output"))
_TORCH = ("self_attn", "linear2")
WRITTEN = {
    "gpt_neox": ("attention", "mlp", None),
    "parallel": ("attention", "mlp", None),
    "sequential": ("attention", "mlp", ("post_attention_layernorm", "input")),
    "bloom": ("self_attention.dense", "mlp.dense_4h_to_h", ("post_attention_layernorm", "input")),
    "gpt2": ("attn", "mlp", ("ln_2", "input")),
    "gptj": ("attn", "mlp", None),
    "llama": _HF,
    "mistral": _HF,
    "qwen2": _HF,
    "mixtral": _HF,
    "gemma2": (
        "post_attention_layernorm",
        "post_feedforward_layernorm",
        ("pre_feedforward_layernorm", "input"),
    ),
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm", ("mlp", "input")),
    "opt": ("self_attn", "fc2", ("final_layer_norm", "input")),
    "falcon": ("self_attention", "mlp", None),
    "phi": ("self_attn", "mlp", None),
    "bert": _BERT,
    "roberta": _BERT,
    "modernbert": ("attn", "mlp", ("mlp_norm", "input")),
    "t5 encoder": (
        "layer.0.SelfAttention",
        "layer.1.DenseReluDense",
        ("layer.1.layer_norm", "input"),
    ),
    "distilbert": ("attention.out_lin", "ffn", ("sa_layer_norm", "output")),
    "deberta_v2": _BERT,
    "nemotron": _HF,
    "mamba": (None, None, None),
    "nanoGPT": ("attn", "mlp", ("ln_2", "input")),
    "torch, norm first": (*_TORCH, ("norm2", "input")),
    "torch, norm last": (*_TORCH, ("norm1", "output")),
}
"""Modules of a block whose output attention and MLP write, and whose input or output is the stream
between.
"""


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


def built(name, dtype=torch.float64):
    torch.manual_seed(0)
    model = BUILD[name]().eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) / 10
    return model.to(dtype)


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


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-6)])
@pytest.mark.parametrize("name", BUILD)
def test_parts_add_up_to_the_blocks_own_moments(name, dtype, rtol):
    model, ids = built(name, dtype), token_batch()["input_ids"]
    expected, found = measured(model, ids, "blocks"), ledgers(measured(model, ids, "residual"))
    assert list(found) == BLOCKS
    for layer, values in found.items():
        assert_parts_add_up(values, expected[layer], rtol)
        writes = {"Q_from_other"} if name == "mamba" else {"Q_from_attention", "Q_from_mlp"}
        assert writes <= values.keys()
        assert ("Q_from_norm_bias" in values) == (name in POST_NORM)
        # Mamba has its stream in float32
        eps = torch.finfo(torch.float32 if name == "mamba" else dtype).eps
        assert abs(values["Q_from_rounding"]) < 100 * eps * values["Q"]


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.slow
def test_layers_inside_are_what_modules_write_and_what_is_between(name):
    model, ids = built(name), token_batch()["input_ids"]
    paths = dict(zip(("attention", "mlp", "middle"), WRITTEN[name], strict=True))
    if name == "mamba":
        paths["other"] = "mixer"
    block = _block(model, "block.01")
    seen = {}
    for kind, given in paths.items():
        if given is not None:
            path, side = given if isinstance(given, tuple) else (given, "output")
            _hook(
                block.get_submodule(path),
                side == "input",
                lambda rows, kind=kind: seen.__setitem__(kind, rows),
            )
    found = measured(model, ids, "residual")
    assert {
        layer.removeprefix("block.01.") for layer in found if layer.startswith("block.01.")
    } == {*seen, "ledger"}
    for kind, rows in seen.items():
        values, mean = found[f"block.01.{kind}"], rows.mean(0)
        assert values["n"] == len(rows)
        assert values["Q"] == pytest.approx(float(rows.square().sum(1).mean()), rel=1e-9)
        assert values["M"] == pytest.approx(float(mean.square().sum()), rel=1e-9)
        assert values["V"] == pytest.approx(float((rows - mean).square().sum(1).mean()), rel=1e-9)


def _hook(module, takes_input, keep):
    def first(given):
        return given[0] if isinstance(given, tuple) else given

    def hook(module, args, kwargs, output):
        hidden = (
            (first(args) if args else kwargs["hidden_states"]) if takes_input else first(output)
        )
        keep(hidden.detach().clone().flatten(0, -2))

    module.register_forward_hook(hook, with_kwargs=True)


def test_state_space_and_attention_blocks_in_turn_have_the_writes_that_they_have():
    model = FAMILIES["jamba"].build().eval()
    found = measured(model, token_batch()["input_ids"], ["blocks", "residual"])
    for layer, values in ledgers(found).items():
        assert_parts_add_up(values, found[layer], 1e-6)
        assert ("Q_from_attention" in values) == any(
            "attn" in name for name, _ in _block(model, layer).named_modules()
        )
        assert ("Q_from_other" in values) == any(
            "mamba" in name for name, _ in _block(model, layer).named_modules()
        )
        assert "Q_from_mlp" in values


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


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
def test_a_planted_offset_is_found_at_its_block_and_write(name):
    model, ids = built(name), token_batch()["input_ids"]
    offset = torch.zeros(16, dtype=torch.float64)
    offset[5] = 40.0
    mlps = [module for path, module in model.named_modules() if path.endswith(".1.mlp")]
    before = ledgers(measured(model, ids, "residual"))
    handle = mlps[0].register_forward_hook(lambda module, args, output: output + offset)
    layers = measured(model, ids, "residual")
    found = ledgers(layers)
    handle.remove()
    assert [layer for layer in BLOCKS if found[layer]["M_from_mlp"] > 1000] == ["block.01"]
    assert found["block.00"] == before["block.00"]
    assert layers["block.01.mlp"]["M"] == pytest.approx(found["block.01"]["M_from_mlp"], rel=1e-12)
    outputs = []
    mlps[0].register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    run(model, ids)
    mean = outputs[0].flatten(0, 1).mean(0)
    assert found["block.01"]["M_from_mlp"] == pytest.approx(
        float((mean + offset).square().sum()), rel=1e-6
    )
    assert found["block.01"]["V_from_mlp"] == pytest.approx(
        before["block.01"]["V_from_mlp"], rel=1e-6
    )
    assert found["block.01"]["mlp_top_coordinate"] == 5
    assert found["block.01"]["mlp_top_coordinate_share"] > 0.9


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
def test_a_planted_outlier_coordinate_is_found_at_its_block_and_write(name):
    model, ids = built(name), token_batch()["input_ids"]
    noise = 40 * torch.randn(ids.numel(), generator=torch.Generator().manual_seed(5)).double().view(
        *ids.shape
    )
    outlier = torch.zeros(*ids.shape, 16, dtype=torch.float64)
    outlier[..., 7] = noise
    (mlp,) = (module for path, module in model.named_modules() if path.endswith(".1.mlp"))
    outputs = []
    mlp.register_forward_hook(
        lambda module, args, output: outputs.append(output.detach() + outlier) or outputs[-1]
    )
    layers = measured(model, ids, "residual")
    found = ledgers(layers)
    assert [layer for layer in BLOCKS if found[layer]["V_from_mlp"] > 500] == ["block.01"]
    rows = outputs[0].flatten(0, 1)
    size = (rows - rows.mean(0)).square().sum(1).mean()
    assert found["block.01"]["V_from_mlp"] == pytest.approx(float(size), rel=1e-6)
    assert found["block.01"]["mlp_top_coordinate"] == 7
    of_coordinates = rows.square().mean(0)
    share = float(of_coordinates[7] / of_coordinates.sum())
    assert found["block.01"]["mlp_top_coordinate_share"] == pytest.approx(share, rel=1e-6)


@pytest.mark.parametrize("name", ["gpt_neox", "llama", "gpt2", "bert", "falcon", "t5 encoder"])
def test_autocast_to_a_narrow_dtype_is_rounding_too(name):
    model, ids = built(name, torch.float32), token_batch()["input_ids"]
    with torch.autocast("cpu", torch.bfloat16):
        found = ledgers(measured(model, ids, "residual"))
        expected = measured(model, ids, "blocks")
    for layer, values in found.items():
        assert_parts_add_up(values, expected[layer], 1e-6)
        assert {"Q_from_attention", "Q_from_mlp"} <= values.keys()
        assert abs(values["Q_from_rounding"]) < 0.03 * values["Q"]


@pytest.mark.slow
def test_writes_too_small_for_their_dtype_are_told_alike_in_every_batch():
    model = built("gpt2", torch.bfloat16)
    for path, parameter in model.named_parameters():
        if "attn.c_proj" in path:
            parameter.data *= 1e-3
    for seed in range(6):
        with observe(model, "residual") as geometry, torch.no_grad():
            for each in range(4):
                model(input_ids=token_batch(seed=10 * seed + each)["input_ids"])
        values = geometry.compute()
        writes = [
            values[layer] for layer in ("block.01.attention", "block.01.mlp") if layer in values
        ]
        assert writes
        assert {of_layer["n"] for of_layer in writes} == {values["block.01.ledger"]["n"]}


def test_a_write_that_begins_as_zero_is_found_once_it_is_not():
    model, ids = built("gpt2"), token_batch()["input_ids"]
    projection = model.transformer.h[1].mlp.c_proj
    weights = [parameter.detach().clone() for parameter in projection.parameters()]
    for parameter in projection.parameters():
        parameter.data.zero_()
    with observe(model, "residual", lambda dim: [TokenMoments(dim)]) as geometry, torch.no_grad():
        model(input_ids=ids)
        first = ledgers(geometry.compute())
        for parameter, weight in zip(projection.parameters(), weights, strict=True):
            parameter.data.copy_(weight)
        geometry.reset()
        model(input_ids=ids)
        second = ledgers(geometry.compute())
    assert "Q_from_mlp" not in first["block.01"]
    assert second["block.01"] == ledgers(measured(model, ids, "residual"))["block.01"]


def test_beside_the_blocks_they_are_measured_as_always():
    model, ids = built("llama"), token_batch()["input_ids"]
    expected, found = measured(model, ids, "blocks"), measured(model, ids, ["blocks", "residual"])
    assert repr({layer: found[layer] for layer in expected}) == repr(expected)
    assert repr(ledgers(found)) == repr(ledgers(measured(model, ids, "residual")))


def test_what_rounding_leaves_in_a_narrow_dtype_is_a_part_of_its_own():
    model, ids = built("llama", torch.bfloat16), token_batch()["input_ids"]
    for values in ledgers(measured(model, ids, "residual")).values():
        assert 0 < abs(values["Q_from_rounding"]) < 0.03 * values["Q"]
        parts = [value for key, value in values.items() if key.startswith("Q_from_")]
        assert sum(parts) == pytest.approx(values["Q"], rel=1e-9)


def test_sequences_as_rows_have_parts_that_add_up_too():
    model, ids = built("llama"), token_batch()["input_ids"]
    expected, found = (
        measured(model, ids, layers, rows="mean") for layers in ("blocks", "residual")
    )
    for layer, values in ledgers(found).items():
        assert values["n"] == len(ids)
        for key in ("Q", "M", "V"):
            parts = [value for each, value in values.items() if each.startswith(f"{key}_from_")]
            # means are float32
            assert sum(parts) == pytest.approx(expected[layer][key], abs=1e-6 * values["Q"])


@pytest.mark.slow
def test_a_background_with_standard_errors_has_the_same_numbers():
    histories = []
    for background in (False, True):
        torch.manual_seed(0)
        model = gpt_neox(use_parallel_residual=False)
        options = {"jackknife": 3, "background": background, "on_error": "raise"}
        monitor = StepMonitor(
            model, 1, layers="residual", metrics=lambda dim: [TokenMoments(dim)], **options
        )
        for step in range(2):
            with monitor.step(step):
                model(**token_batch(seed=step)).logits.sum().backward()
        monitor.close()
        histories.append(monitor.history)
    now, later = histories
    assert repr(now) == repr(later)
    errors = [
        record["stderr"]
        for record in now
        if record["metric"] == "M_by_mlp" and record["layer"] != "ledger.mean"
    ]
    assert len(errors) == 6
    assert all(error > 0 for error in errors)


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


def test_a_block_that_hides_its_writes_is_refused_by_name():
    model = FAMILIES["opt"].build(dropout=0.5).train()  # its dropout is no module
    with pytest.raises(ValueError, match="left over") as caught, observe(model, "residual"):
        model(**token_batch())
    assert "at layer 'block.00.ledger'" in caught.value.__notes__


def test_blocks_that_are_applied_several_times_are_refused():
    with (
        pytest.raises(ValueError, match=r"called once each; block\.00 is applied several times"),
        observe(FAMILIES["albert"].build(), "residual"),
    ):
        pass


@pytest.mark.parametrize("option", [{"rows": "max"}])
def test_maxima_are_no_sums_of_streams(option):
    with (
        pytest.raises(ValueError, match='rows="max"'),
        observe(FAMILIES["llama"].build(), "residual", **option),
    ):
        pass


def trained(layers):
    """Weights and random state after steps with dropout, measured at ``layers`` if any."""
    torch.manual_seed(0)
    model = gpt_neox(hidden_dropout=0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    monitor = StepMonitor(model, 1, layers=layers or "blocks", on_error="raise")
    for step in range(3):
        batch = token_batch(seed=step)
        with monitor.step(step, batch) if layers else nullcontext():
            model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if layers:
        assert {record["layer"] for record in monitor.history} >= {
            "block.00.ledger",
            "block.02.mlp",
        }
        assert any(record["metric"] == "V_W_share_mlp" for record in monitor.history)
    return [*(weight.detach() for weight in model.parameters()), torch.get_rng_state()]


def history(way):
    torch.manual_seed(0)
    model = gpt_neox(use_parallel_residual=False, hidden_dropout=0.1).train()
    if way == "checkpointing":
        checkpoint_activations(model, False)
    options = {"compiled": "stable"} if way == "stable" else {}
    monitor = StepMonitor(
        model, 1, layers="residual", metrics=lambda dim: [TokenMoments(dim)], **options
    )
    if way == "stable":
        monitor.prepare(model)
    forward = torch.compile(model, backend="eager") if way in ("compiled", "stable") else model
    for step in range(2):
        batch = token_batch(seed=step)
        with monitor.step(step, batch):
            forward(**batch, labels=batch["input_ids"]).loss.backward()
    monitor.close()
    return repr(monitor.history)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["checkpointing", "compiled", "stable"])
def test_checkpointed_and_compiled_models_have_the_same_ledger(way):
    assert history(way) == history("plain")


def test_training_is_bit_for_bit_the_same():
    for plain, watched in zip(trained(None), trained("residual"), strict=True):
        assert torch.equal(plain, watched)


def test_describe_says_what_the_streams_hold():
    model = gpt_neox(hidden_size=256)  # whose streams are wider together than what is timed
    few, many = (
        GeometryMonitor(layers=layers).describe(model, token_batch())
        for layers in ("block.*", "residual")
    )
    assert {layer.width for layer in many.layers} == {layer.width for layer in few.layers}
    assert many.state_bytes > 0
    assert many.seconds > 0
