"""Every model family: its layers are found, in order, and are the model's own hidden states."""

from itertools import accumulate

import pytest
import torch
import transformers as hf
from torch import nn

from embedgeo import observe
from embedgeo.capture.structure import input_embedding, submodels
from tests.models import (
    FAMILIES,
    VOCABULARY,
    Family,
    NanoGPT,
    TorchEncoder,
    eval_model,
    linear_block,
    llama,
    token_batch,
    vit,
)
from tests.observed import hidden_states, layer_names, observed, rows_seen
from tests.training.runs import in_one_process

BLOCKS = ["embed", "block.00", "block.01", "block.02"]
_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 3}


def test_layers_are_the_models_own_hidden_states():
    for i, family in enumerate(FAMILIES):
        assert_own_hidden_states(family, ("left", "right")[i % 2])


def assert_own_hidden_states(family, padding):
    model = eval_model(family)
    assert input_embedding(model).weight is model.get_input_embeddings().weight
    given = {"": token_batch(padding=padding)}
    batch = given[""]
    norms = FAMILIES[family].final_norm
    if len(norms) == 2:
        given = {"encoder.": batch, "decoder.": token_batch(length=9, padding=padding, seed=1)}
        batch = {**batch, **{f"decoder_{key}": value for key, value in given["decoder."].items()}}
    assert layer_names(model) == [
        f"{prefix}{name}"
        for prefix, norm in norms.items()
        for name in [*BLOCKS, *["final_norm"] * bool(norm)]
    ]
    geometry = observed(model, batch)
    for prefix in norms:
        keep = given[prefix]["attention_mask"].bool()
        for name, state in zip(BLOCKS, hidden_states(model, batch, family, prefix), strict=True):
            rows, ids = rows_seen(geometry, prefix + name)
            assert torch.equal(rows, state[keep]), (family, name)
            assert torch.equal(ids, given[prefix]["input_ids"][keep]), (family, name)


_MORE = {
    "opt-350m": Family(
        lambda: FAMILIES["opt"].build(word_embed_proj_dim=8, do_layer_norm_before=False), {"": None}
    ),
    "mamba": Family(lambda: hf.MambaForCausalLM(hf.MambaConfig(**_MAMBA)), {"": None}),
    "rwkv": Family(
        lambda: hf.RwkvForCausalLM(hf.RwkvConfig(**_MAMBA, attention_hidden_size=16)), {"": None}
    ),
}


def test_numbered_hidden_states_are_the_models_output_hidden_states():
    for family, (build, _) in {**FAMILIES, **_MORE}.items():
        assert_numbered_hidden_states(family, build)
    assert_numbered_hidden_states("untied", lambda: llama(tie_last_hidden_states=False))
    assert_numbered_hidden_states("of text and images", lambda: taking(llama(), "pixel_values"))


def taking(model, name):
    for module in (model, model.base_model):
        module.main_input_name = name
    return model


def assert_numbered_hidden_states(family, build):
    torch.manual_seed(0)
    model, ids = build().eval(), token_batch()["input_ids"]
    for parameter in model.parameters():
        if parameter.ndim == 1:  # a norm that changes the direction of rows, as a trained one does
            parameter.data += torch.randn_like(parameter) / 4
    batch = {"input_ids": ids}
    if len(prefixes := submodels(model)) == 2:
        batch["decoder_input_ids"] = token_batch(length=9, seed=1)["input_ids"]
    with torch.no_grad():
        output = model(**batch, output_hidden_states=True)
    geometry = observed(model, batch, "hidden_states")
    states = {
        prefix: output[f"{prefix[:-1]}_hidden_states" if prefix else "hidden_states"]
        for prefix in prefixes
    }
    expected = {
        f"{prefix}hidden.{i:02d}": state
        for prefix in prefixes
        for i, state in enumerate(states[prefix])
    }
    assert layer_names(model, "hidden_states") == list(expected)
    for name, state in expected.items():
        assert torch.equal(rows_seen(geometry, name)[0], state.flatten(0, 1)), (family, name)
    if len({state.shape[-1] for each in states.values() for state in each[-2:]}) > 1:
        return  # what it projects its states to is their mean with nothing
    geometry = observed(model, batch, ["blocks", "mean(last2)"])
    blocks = layer_names(model)
    for prefix in prefixes:
        last = [each for each in blocks if each.startswith(f"{prefix}block.")][-2:]
        mean = torch.stack([rows_seen(geometry, each)[0] for each in last]).mean(0)
        found, _ = rows_seen(geometry, f"{prefix}mean(last2)")
        torch.testing.assert_close(found, mean, rtol=1e-5, atol=1e-6)


def test_a_model_without_token_ids_gives_what_needs_none():
    model, images = vit().eval(), {"pixel_values": torch.randn(2, 3, 16, 16)}
    values = in_one_process(model, [images])
    with torch.no_grad():
        states = model(**images, output_hidden_states=True).hidden_states
    for name in ("pixel_values", "flattened_patches"):
        numbered = observed(taking(model, name), images, "hidden_states")
        for i, state in enumerate(states):
            assert torch.equal(rows_seen(numbered, f"hidden.{i:02d}")[0], state.flatten(0, 1))
    assert list(values) == layer_names(model)
    assert list(values)[:4] == BLOCKS
    assert values["embed"]["n"] == 2 * 17
    assert values["block.02"]["intrinsic_dimension"] > 1
    assert not {"V_W", "V_W_unbiased", "token_types"} & values["block.02"].keys()
    without_class_token = observed(model, images, skip_first_positions=1)
    assert torch.equal(
        rows_seen(without_class_token, "block.00")[0], states[1][:, 1:].flatten(0, 1)
    )


@pytest.mark.parametrize(("stack", "rows"), [(nn.ModuleList, 1), (nn.Sequential, 4)])
def test_a_model_in_the_manner_of_nanogpt(stack, rows):
    model = NanoGPT(stack).eval()
    idx = token_batch(rows)["input_ids"]
    assert layer_names(model) == [*BLOCKS, "final_norm"]
    with torch.no_grad():
        states = model.states(idx)
    geometry = observed(model, {"idx": idx})
    for name, state in zip(BLOCKS, states, strict=True):
        seen, ids = rows_seen(geometry, name)
        assert torch.equal(seen, state.flatten(0, 1)), name
        assert torch.equal(ids, idx.flatten()), name


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("order", ["batch first", "positions first", "transposed inside"])
def test_torchs_own_encoder(order, training):
    torch.manual_seed(0)
    model = TorchEncoder(
        batch_first=order == "batch first", transposes=order == "transposed inside"
    ).train(training)
    batch = token_batch(padding="right")  # the padding that its fused kernels for inference take
    ids, keep = batch["input_ids"], batch["attention_mask"].bool()
    given = ids.T if order == "positions first" else ids
    assert layer_names(model) == [*BLOCKS, "final_norm"]
    with torch.no_grad():
        states = [model.table(ids if order == "batch first" else ids.T)]
        for block in model.encoder.layers:
            states.append(block(states[-1], src_key_padding_mask=~keep))
    geometry = observed(model, {"ids": given, "padding": ~keep}, skip_first_positions=1)
    kept = keep.clone()
    kept[:, 0] = False
    for name, state in zip(BLOCKS, states, strict=True):
        rows, token_ids = rows_seen(geometry, name)
        batch_first = state if order == "batch first" else state.transpose(0, 1)
        torch.testing.assert_close(rows, batch_first[kept], msg=name)
        assert torch.equal(token_ids, ids[kept]), name
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_block_that_is_listed_several_times_is_a_layer_each_time():
    block = linear_block(4)
    model = nn.ModuleDict({"layers": nn.ModuleList([block, linear_block(4), block])})
    with observe(model, [*BLOCKS, "mean(last2)"]) as geometry, torch.no_grad():
        passes = [
            list(accumulate(model["layers"], lambda h, layer: layer(h), initial=x))
            for x in torch.randn(2, 2, 3, 4)
        ]
        _, *states = [torch.cat(outputs) for outputs in zip(*passes, strict=True)]
    values = geometry.compute()
    squares = [
        float(state.square().sum(-1).mean()) for state in [*states, (states[1] + states[2]) / 2]
    ]
    found = [values[name]["Q"] for name in [*BLOCKS[1:], "mean(last2)"]]
    assert found == pytest.approx(squares, rel=1e-5)
