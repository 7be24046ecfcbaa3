"""Calls of a model by its bare forward, of its copies and replicas, and those of its blocks
alone.
"""

import copy
import io

import pytest
import torch
from torch import nn

from embedgeo import observe
from tests.models import FAMILIES, gpt_neox, linear_block, token_batch
from tests.observed import Rows, observed, rows_seen


@pytest.mark.parametrize(
    "family", ["gpt_neox", "bert", "bloom", "opt", "modernbert", "distilbert", "albert", "t5"]
)
@pytest.mark.parametrize("whole", [True, False])
def test_padding_is_left_out_where_a_model_is_called_by_its_forward(family, whole):
    model, batch = FAMILIES[family].build().eval(), token_batch(padding="right")
    if family == "t5":
        batch["decoder_input_ids"] = batch["input_ids"]
    elif not whole:
        model = model.base_model
    expected = observed(model, batch, "*block.01")
    with observe(model, "*block.01", lambda dim: [Rows(dim)]) as geometry, torch.no_grad():
        model.forward(**batch)
    for layer in expected.compute():
        for seen, rows in zip(rows_seen(geometry, layer), rows_seen(expected, layer), strict=True):
            assert torch.equal(seen, rows), layer
    assert len(rows_seen(geometry, "encoder.block.01" if family == "t5" else "block.01")[0]) == 36


@pytest.mark.parametrize("as_function", [True, False])
def test_observe_takes_a_mask_and_token_ids_or_functions_of_the_batch(as_function):
    model, batch = gpt_neox().eval(), token_batch()
    keep, ids = batch["input_ids"] > 40, batch["input_ids"] + 7
    options = {"mask": keep, "token_ids": ids}
    if as_function:
        options = {"mask": lambda b: b["input_ids"] > 40, "token_ids": lambda b: b["input_ids"] + 7}
    geometry = observed(model, batch, "block.01", **options)
    assert torch.equal(rows_seen(geometry, "block.01")[1], ids[keep])


def test_functions_of_the_batch_need_a_call_and_must_return_a_tensor():
    model, batch = gpt_neox().eval(), token_batch()
    with pytest.raises(TypeError, match="mask= must return a tensor; got list"):
        observed(model, batch, mask=lambda b: b["input_ids"].tolist())
    parts = nn.ModuleDict({"layers": nn.ModuleList([linear_block(4)])})
    message = "mask= can be a function of the batch only where the model is called"
    with pytest.raises(ValueError, match=message), observe(parts, mask=lambda b: b):
        parts["layers"][0](torch.randn(2, 5, 4))


# ── Copies and replicas
# ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_copy_made_while_the_model_is_measured_is_never_counted():
    model, batch = gpt_neox().eval(), token_batch()
    with observe(model, "block.02", lambda dim: [Rows(dim)]) as geometry, torch.no_grad():
        twin = copy.deepcopy(model)
        model(**batch)
        twin(**batch)
        twin.forward(**batch)
    assert len(rows_seen(geometry, "block.02")[0]) == 48
    with geometry.probe, torch.no_grad():
        twin(**batch)
    assert len(rows_seen(geometry, "block.02")[0]) == 48
    with observe(twin, "block.02", lambda dim: [Rows(dim)]) as of_twin, torch.no_grad():
        twin(**batch)
    assert len(rows_seen(of_twin, "block.02")[0]) == 48


def test_a_copy_is_a_model_of_its_own_and_holds_nothing_of_the_probe():
    model, batch = gpt_neox().eval(), token_batch()
    with observe(model):
        twin = copy.deepcopy(model)
        saved = io.BytesIO()
        torch.save(model, saved)
        model(**batch)
    saved.seek(0)
    for other in (twin, torch.load(saved, weights_only=False)):
        assert [type(module) for module in other.modules()] == [
            type(module) for module in model.modules()
        ]
        torch.nn.init.zeros_(other.get_output_embeddings().weight)
        assert not other.forward(**batch).logits.any()
        assert not other(**batch).logits.any()
    assert type(model) is type(gpt_neox())
    assert model(**batch).logits.any()


def test_two_probes_may_end_in_any_order():
    model, batch = gpt_neox().eval(), token_batch(padding="left")
    with observe(model, "block.02", lambda dim: [Rows(dim)]) as first:
        second = observe(model, "block.01", lambda dim: [Rows(dim)])
        inner = second.__enter__()
        model.forward(**batch)
    model.forward(**batch)
    second.__exit__(None, None, None)
    model.forward(**batch)
    assert len(rows_seen(first, "block.02")[0]) == 36
    assert len(rows_seen(inner, "block.01")[0]) == 2 * 36
