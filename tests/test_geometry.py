import pytest
import torch
from torch import nn

import embedgeo
from embedgeo import EmbeddingMoments, TokenMoments, observe
from tests.models import PAD, eval_model, gpt_neox, linear_block, token_batch
from tests.observed import observed, rows_seen
from tests.ranks import on_two_ranks
from tests.training.runs import observed_on


def test_compute_gives_floats_and_a_frame():
    geometry = observed_on(gpt_neox().eval(), [token_batch()])
    values = geometry.compute()
    assert list(values) == ["embed", "block.00", "block.01", "block.02", "final_norm"]
    assert all(type(value) is float for value in values["embed"].values())
    frame = geometry.to_frame()
    assert list(frame.columns) == ["layer", "layer_index", "metric", "value", "stderr"]
    assert (
        frame.set_index(["layer", "metric"]).loc[("block.01", "V"), "value"]
        == values["block.01"]["V"]
    )
    assert frame.groupby("layer").layer_index.first().to_dict() == {
        name: i for i, name in enumerate(values)
    }


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"skip_first_positions": -1}, ValueError, "must not be negative; got -1"),
        ({"rows": "sum"}, ValueError, "rows must be one of 'tokens', .*; got 'sum'"),
        ({"ignore_token_ids": ["a"]}, TypeError, "ignore_token_ids must be a list of integers"),
        ({"ignore_token_ids": 3}, TypeError, "ignore_token_ids must be a list of integers"),
        ({"ignore_token_ids": map(int, "3")}, TypeError, "ignore_token_ids must be a list of"),
        ({"jackknife": 1}, ValueError, "jackknife must be a number of groups, 2 or more"),
    ],
)
def test_wrong_arguments_are_refused_before_any_forward_pass(options, error, message):
    with pytest.raises(error, match=message):
        observe(gpt_neox(), **options).__enter__()


def test_metrics_that_cannot_be_are_refused_when_they_first_measure():
    model, batch = gpt_neox(), token_batch()
    with (
        pytest.raises(TypeError, match=r"for 16 it makes \['V'\]"),
        observe(model, metrics=lambda dim: ["V"]),
    ):
        model(**batch)
    message = "TokenMoments and EmbeddingMoments both give 'n'"
    with observe(model, metrics=lambda dim: [TokenMoments(dim), EmbeddingMoments(dim)]) as geometry:
        model(**batch)
    with pytest.raises(ValueError, match=message) as caught:
        geometry.compute()
    assert caught.value.__notes__ == ["at layer 'embed'"]


def test_a_function_of_layers_is_called_once():
    asked = []
    with observe(gpt_neox(), layers=lambda model: asked.append(model) or "block.01") as geometry:
        geometry.model(**token_batch())
    assert len(asked) == len(geometry.compute()) == 1


def test_after_a_reset_metrics_measure_again_as_if_new():
    model, batch = gpt_neox().eval(), token_batch()
    with observe(model) as geometry, torch.no_grad():
        model(**batch)
        first = repr(geometry.records())
        with torch.inference_mode():
            geometry.reset()
        assert geometry.records() == []
        model(**batch)
        assert repr(geometry.records()) == first


def test_what_needs_token_ids_says_so():
    model, batch = gpt_neox(), token_batch()
    embedded = {"inputs_embeds": torch.randn(2, 5, 16)}
    with (
        pytest.raises(ValueError, match="ignore_token_ids needs token ids"),
        observe(model, ignore_token_ids=[PAD]),
    ):
        model(**embedded)
    flat = nn.ModuleDict({"layers": nn.ModuleList([linear_block(4)])})
    with (
        pytest.raises(ValueError, match="skip_first_positions needs"),
        observe(flat, skip_first_positions=1),
    ):
        flat["layers"][0](torch.randn(2, 5, 4))
    message = r"layer 'gpt_neox.rotary_emb' must have a row for each token"
    with pytest.raises(ValueError, match=message), observe(model, "*.rotary_emb"):
        model(**batch)


def test_ids_that_are_not_read_are_told():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([linear_block(4)])

        def forward(self, input_ids, states):
            return self.layers[0](states)

    model, ids = Reads(), token_batch()["input_ids"]
    with pytest.warns(UserWarning, match="such as token ids, but no"), observe(model):
        model(input_ids=ids, states=torch.randn(*ids.shape, 4))
    model = nn.Sequential(nn.Embedding(50, 4), nn.Transformer(4, 2, 1, 1, 8, batch_first=True))
    model.forward = lambda ids: model[1](model[0](ids), model[0](ids))
    with pytest.warns(UserWarning, match="such as token ids, but no"), observe(model):
        model(ids % 50)


def test_first_positions_of_torchs_transformer_are_those_of_the_rows_shape():
    model = nn.Transformer(4, 2, 1, 1, 8, batch_first=True)
    with observe(model, skip_first_positions=2) as geometry:
        model(torch.randn(3, 5, 4), torch.randn(3, 7, 4))
    values = geometry.compute()
    assert values["encoder.block.00"]["n"] == 9
    assert values["decoder.block.00"]["n"] == 15


@pytest.mark.slow
def test_a_rank_that_measures_nothing_does_not_hang_the_other(tmp_path):
    first, second = on_two_ranks(values_with_an_idle_rank, tmp_path)
    for layer, values in first.items():
        assert second[layer] == pytest.approx(values, rel=0, nan_ok=True), layer
    assert first["block.00"]["n"] == 48


@pytest.mark.slow
def test_ranks_that_have_parts_of_the_same_sequences_are_refused(tmp_path):
    for message in on_two_ranks(message_of_parts, tmp_path):
        assert "position ids begin at 0 on one rank and at 6 on another one" in message


@pytest.mark.slow
def test_ranks_that_observe_with_other_arguments_or_layers_are_told_which(tmp_path):
    for messages in on_two_ranks(messages_of_others, tmp_path):
        differing = [each.split()[6] for each in messages]
        assert differing == ["skip_first_positions", "layers", "model"]


def messages_of_others(rank):
    messages = []
    for geometry in (
        embedgeo.Geometry(gpt_neox(), skip_first_positions=rank),
        embedgeo.Geometry(gpt_neox(num_hidden_layers=1 + rank), "*.mlp"),
        embedgeo.Geometry(gpt_neox(hidden_size=16 + 16 * rank)),
    ):
        with pytest.raises(ValueError, match="alike") as caught:
            geometry.compute()
        messages.append(str(caught.value))
    return messages


def message_of_parts(rank):
    batch = token_batch(length=6)
    with observe(gpt_neox()) as geometry:
        geometry.model(**batch, position_ids=6 * rank + torch.arange(6)[None])
    with pytest.raises(ValueError, match="whole sequences") as caught:
        geometry.records()
    return str(caught.value)


def values_with_an_idle_rank(rank):
    model = eval_model("gpt_neox")
    geometry = embedgeo.Geometry(
        model, metrics=lambda dim: [TokenMoments(dim, count_range=(1, 99))]
    )
    if rank == 0:
        with geometry.probe, torch.no_grad():
            model(**token_batch())
    return geometry.compute()


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("rows", ["mean", "first", "last"])
def test_sequences_can_be_the_rows(rows, padding):
    model, batch = eval_model("gpt_neox"), token_batch(padding=padding)
    batch["attention_mask"][1] = 0  # a sequence without any token that counts is no row
    ignored = batch["input_ids"][0, 9].item()
    options = {"skip_first_positions": 1, "ignore_token_ids": [ignored]}
    layers = ["block.01", "mean(last2)"]
    with torch.no_grad():
        state = model(**batch, output_hidden_states=True).hidden_states[2]
    real = batch["attention_mask"].bool()
    counts = real & (real.cumsum(1) > 1) & (batch["input_ids"] != ignored)
    places = {i: counts[i].nonzero().flatten() for i in (0, 2, 3)}
    chosen = {"first": lambda at: at[:1], "last": lambda at: at[-1:]}.get(rows, lambda at: at)
    expected = torch.stack([state[i, chosen(at)].mean(0) for i, at in places.items()])
    geometry = observed(model, batch, layers, rows=rows, **options)
    seen, ids = rows_seen(geometry, "block.01")
    torch.testing.assert_close(seen, expected, rtol=1e-6, atol=1e-6)
    if rows == "mean":
        assert ids is None
    else:
        assert ids.tolist() == [
            batch["input_ids"][i, chosen(at)].item() for i, at in places.items()
        ]
    assert rows_seen(geometry, "mean(last2)")[0].shape == (3, 16)


def test_observe_outside_of_with_says_what_is_missing() -> None:
    with pytest.warns(UserWarning, match=r"inside `with embedgeo\.observe\(model\) as geometry:`"):
        assert observe(gpt_neox()).compute() == {}
