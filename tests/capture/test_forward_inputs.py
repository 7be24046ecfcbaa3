"""Token ids and masks of padded and packed sequences, with a cache, and of several batches in one
forward pass.
"""

import pytest
import torch
import transformers as hf
from torch import nn

from embedgeo import StepMonitor, observe
from embedgeo.functional.rows import sequence_positions
from tests.models import NanoGPT, gpt_neox, token_batch
from tests.observed import hidden_states, kept_rows, observed, rows_seen


def test_embedded_inputs_have_no_token_ids_but_a_mask_and_positions():
    model, batch = gpt_neox().eval(), token_batch(padding="left")
    with torch.no_grad():
        embedded = {"inputs_embeds": model.get_input_embeddings()(batch["input_ids"])}
    mask = batch["attention_mask"]
    rows, ids = rows_seen(observed(model, {**embedded, "attention_mask": mask}), "block.00")
    assert torch.equal(rows, hidden_states(model, batch)[1][mask.bool()])
    assert ids is None
    unmasked = rows_seen(observed(model, embedded, skip_first_positions=3), "embed")[0]
    assert torch.equal(unmasked, embedded["inputs_embeds"][:, 3:].flatten(0, 1))
    with observe(model, metrics=kept_rows) as geometry:
        model(**batch)
        model(**embedded)  # what the first pass was given does not hold for the second
    rows, ids = rows_seen(geometry, "block.00")
    assert len(ids) == mask.sum()
    assert len(rows) == mask.sum() + mask.numel()


def four_dimensional(keep, *, causal, added, num_cached=0, queries=True):
    """A mask of pairs, which padding attends to nothing by."""
    length = keep.shape[1]
    pairs = (keep[:, None, :] & (keep[:, :, None] if queries else True))[:, None]
    pairs = pairs.expand(-1, 1, length, -1)
    pairs = pairs.tril() if causal else pairs
    pairs = nn.functional.pad(pairs, (0, num_cached))
    return torch.zeros(pairs.shape).masked_fill(~pairs, -1e9) if added else pairs


@pytest.mark.parametrize("padding", ["left", "right", None])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "form", [{"added": True}, {"added": False, "queries": False}, {"added": True, "num_cached": 3}]
)
def test_a_mask_of_four_dimensions_tells_padding(padding, causal, form):
    batch = token_batch(padding=padding)
    keep = batch["attention_mask"].bool()
    if form.get("num_cached") and not causal:
        return
    counts = rows_told(batch["input_ids"], four_dimensional(keep, causal=causal, **form))
    assert torch.equal(counts, batch["input_ids"][keep])


class Rows(nn.Module):
    """Its layer has a row for each token id, whatever else it is given."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(96, 4), nn.Identity()

    def forward(self, input_ids, **others):
        return self.layer(self.table(input_ids))


def rows_told(ids, mask):
    given = {"input_ids": ids, "attention_mask": mask}
    return rows_seen(observed(Rows(), given, "layer"), "layer")[1]


def test_masks_that_do_not_tell_padding_are_refused():
    ids = token_batch(rows=6, length=6)["input_ids"]
    blocks = torch.block_diag(*torch.ones(3, 2, 2)).bool().expand(6, 1, 6, 6)
    window = torch.ones(6, 6).tril()
    closed = torch.full((6, 6), -torch.inf).triu(1)
    prefix = window.index_fill(1, torch.arange(3), 1)  # seen from all positions
    for mask in (blocks, window, window.triu(-2), closed, closed.bool(), prefix):
        with pytest.raises(ValueError, match=r"attention_mask, .*does not tell padding"):
            rows_told(ids, mask)
    causal = torch.ones(1, 1, 6, 6).tril()
    assert torch.equal(rows_told(ids, causal), ids.flatten())
    step = torch.arange(9).expand(6, 1, 1, 9) < 5  # of a static cache
    assert torch.equal(rows_told(ids[:, :1], step), ids[:, 0])


def test_position_ids_that_do_not_grow_mark_no_texts():
    ids = token_batch(rows=2, length=6)["input_ids"]
    for row, num_texts in (([0] * 6, 1), ([2, 3, 4, 2, 3, 1], 2), ([1, 1, 0, 1, 2, 3], 2)):
        batch = {"input_ids": ids, "position_ids": torch.tensor([row, row])}
        geometry = observed(gpt_neox(), batch, "block.00", rows="last")
        assert len(rows_seen(geometry, "block.00")[0]) == 2 * num_texts


def test_two_masks_of_one_name_tell_nothing():
    text, other = token_batch(padding="left"), token_batch(padding="right")
    batch = {**text, "other": {"attention_mask": other["attention_mask"]}}
    with pytest.raises(ValueError, match="attention_mask is given twice"):
        observed(Rows(), batch, "layer")


def test_positions_of_one_dimension_mark_the_texts_of_flat_rows():
    ids, positions = torch.tensor([[7, 8, 7, 8, 9, 5], [0, 1, 0, 1, 2, 3]])
    with observe(Rows(), "layer") as geometry:
        geometry.model(ids, position_ids=positions)
    # from pairs in different texts, of which there are two
    assert geometry.compute()["layer"]["V_W_unbiased"] == 0


def test_frames_of_one_time_are_of_one_text():
    # time, height and width of a word, two frames of two patches and a word; the same again
    text = [[0, 1, 1, 1, 1, 3], [0, 1, 1, 1, 1, 3], [0, 1, 2, 1, 2, 3]]
    positions = torch.tensor(text).tile(2)[:, None]
    batch = {"input_ids": torch.arange(12)[None], "position_ids": positions}
    geometry = observed(Rows(), batch, "layer", rows="last")
    assert rows_seen(geometry, "layer")[1].tolist() == [5, 11]


# from transformers 5.24 on
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("form", ["padded", "none", "four dimensions"])
def test_what_a_cache_holds_is_not_counted_again_and_positions_go_on_after_it(form):
    model = gpt_neox().eval()
    batch = token_batch(padding="left" if form == "padded" else None, length=10)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    later = {"padded": mask, "four dimensions": mask[:, None, None].float()}.get(form)
    with (
        observe(model, metrics=kept_rows, skip_first_positions=3) as geometry,
        torch.no_grad(),
    ):
        first = model(input_ids=ids[:, :9], attention_mask=mask[:, :9])
        with pytest.warns(UserWarning, match="go on from a cache count as texts of their own"):
            model(ids[:, 9:], attention_mask=later, past_key_values=first.past_key_values)
    kept = mask.bool() & (mask.cumsum(1) > 3)
    expected = torch.cat([ids[:, :9][kept[:, :9]], ids[:, 9:][kept[:, 9:]]])
    assert torch.equal(rows_seen(geometry, "block.02")[1], expected)


class TwoViews(nn.Module):
    """Encodes two batches of sequences in one forward pass, as contrastive training does."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(96, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 8)

    def forward(self, *views):
        return [
            self.head(self.encoder(self.table(ids), src_key_padding_mask=padding))
            for ids, padding in views
        ]


def padded_views():
    """Token ids and padding of two batches, and the ids that are no padding."""
    batches = token_batch(seed=1, padding="left"), token_batch(seed=2, padding="right")
    masks = [batch["attention_mask"].bool() for batch in batches]
    ids = [batch["input_ids"] for batch in batches]
    return [*zip(ids, (~mask for mask in masks), strict=True)], [
        each[mask] for each, mask in zip(ids, masks, strict=True)
    ]


def test_each_of_two_views_has_its_own_padding():
    views, kept = padded_views()
    with (
        observe(TwoViews().eval(), ["blocks", "head"], kept_rows) as geometry,
        torch.no_grad(),
    ):
        geometry.model(*views)
    for layer in ("embed", "block.01", "head"):
        assert torch.equal(rows_seen(geometry, layer)[1], torch.cat(kept))


def test_a_view_without_gradients_leaves_its_token_ids_to_no_other():
    class TeacherFirst(TwoViews):
        def forward(self, own, other):
            with torch.no_grad():
                super().forward(other)
            return super().forward(own)

    views, kept = padded_views()
    model = TeacherFirst()
    with StepMonitor(model, 1, measure_last=False) as monitor, monitor.step(0):
        sum(each.sum() for each in model(*views)).backward()
    counts = {each["metric"]: each["value"] for each in monitor.history}
    assert (counts["n"], counts["token_types"]) == (len(kept[0]), len(kept[0].unique()))


class Told(nn.Module):
    """A model whose blocks alone are told of the padding, by masks of their own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(96, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)
        )

    def forward(self, batch, mask=None):
        hidden = self.table(batch["ids"])
        for block, padding in zip(self.blocks, batch["padding"], strict=True):
            hidden = block(hidden, src_key_padding_mask=padding)
        return hidden


def test_padding_is_what_blocks_of_torch_are_told():
    batch = token_batch(padding="right")
    ids, padding = batch["input_ids"], batch["attention_mask"] == 0
    for given in ({}, {"mask": padding}):
        with torch.no_grad(), observe(Told().eval(), metrics=kept_rows) as geometry:
            geometry.model({"ids": ids, "padding": [padding, padding]}, **given)
        for layer in ("embed", "block.01"):
            assert torch.equal(rows_seen(geometry, layer)[1], ids[~padding])
    rule = r"differs between calls|argument padding\[1\] does not tell"
    for paddings in ([padding, padding.flip(1)], [None, padding]):
        with pytest.raises(ValueError, match=rule), observe(Told()) as geometry:
            geometry.model({"ids": ids, "padding": paddings})


def test_masks_of_unknown_values_are_refused():
    ids = token_batch()["input_ids"]
    for value in (2, -1, 0.5, -1.0):
        mask = torch.ones(ids.shape, dtype=torch.tensor(value).dtype)
        mask[0, -1] = value
        with pytest.raises(ValueError, match="other values than 0 and 1"):
            rows_told(ids, mask)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(4)])

    def forward(self, hidden, numbers=None):
        return self.blocks[1](self.blocks[0](hidden))


class Inner(Blocks):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(96, 4)

    def forward(self, input_ids, attention_mask, position_ids):
        return super().forward(self.table(input_ids))


class TwoCalls(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, input_ids, attention_mask, position_ids, other):
        self.inner(input_ids, attention_mask, position_ids)
        self.inner(**other)


def test_an_inner_call_has_its_own_mask_and_positions():
    first, other = token_batch(seed=1, padding="left"), token_batch(seed=2, padding="right")
    positions = torch.arange(first["input_ids"].shape[1])[None]
    first, other = {**first, "position_ids": positions}, {**other, "position_ids": positions % 4}
    geometry = observed(TwoCalls(), {**first, "other": other}, "block.01", skip_first_positions=1)
    expected = [
        ids[mask.bool() & (sequence_positions(mask, places) > 1)]
        for ids, mask, places in (first.values(), other.values())
    ]
    assert torch.equal(rows_seen(geometry, "block.01")[1], torch.cat(expected))


class OfDocuments(nn.Module):
    """Its blocks are called with the numbers of documents, or the ids, beside hidden states."""

    def __init__(self):
        super().__init__()
        self.table, self.inner = nn.Embedding(96, 4), Blocks()

    def forward(self, input_ids, attention_mask, position_ids):
        return self.inner(self.table(input_ids), position_ids // 2)


def test_numbers_beside_hidden_states_leave_mask_and_positions_as_they_are():
    batch = token_batch(padding="right")
    positions = torch.arange(batch["input_ids"].shape[1])[None] % 5
    geometry = observed(OfDocuments(), {**batch, "position_ids": positions}, skip_first_positions=1)
    counts = batch["attention_mask"].bool() & (positions > 0)
    assert torch.equal(rows_seen(geometry, "block.01")[1], batch["input_ids"][counts])


class Masked(nn.LayerNorm):
    def forward(self, hidden, attention_mask):
        return super().forward(hidden)


class TakesAny(nn.LayerNorm):
    def forward(self, hidden, *args, **kwargs):
        return super().forward(hidden)


@pytest.mark.parametrize("kind", [Masked, TakesAny])
def test_blocks_that_take_a_mask_are_refused_outside_of_a_call_of_the_model(kind):
    model, ids = Inner(), token_batch()["input_ids"]
    with observe(model, metrics=kept_rows) as geometry:
        model.blocks[1](model.blocks[0](model.table(ids)))
    assert len(rows_seen(geometry, "block.01")[0]) == ids.numel()
    model.blocks[0] = model.blocks[1] = kind(4)
    with pytest.raises(ValueError, match=r"outside of a call .* give mask="), observe(model):
        model.blocks[0](model.table(ids), None)


def test_feature_maps_with_channels_first_are_refused():
    config = hf.SegformerConfig(
        hidden_sizes=[8, 16], depths=[1, 1], num_attention_heads=[1, 2], num_encoder_blocks=2
    )
    with pytest.raises(ValueError, match="feature maps with channels first"):
        observed(hf.SegformerModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)})


def test_a_mask_of_the_kinds_of_attention_is_no_other_mask_of_padding():
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.LongformerConfig(
        **shape, vocab_size=96, intermediate_size=8, attention_window=[4, 4]
    )
    batch = token_batch(padding="right")
    keep = batch["attention_mask"]
    batch["global_attention_mask"] = torch.zeros_like(keep).index_fill_(1, torch.tensor(0), 1)
    rows, _ = rows_seen(observed(hf.LongformerModel(config).eval(), batch), "block.01")
    assert len(rows) == keep.sum()


def test_ids_that_the_model_makes_targets_of_in_place_are_those_that_it_has_looked_up():
    class WithLoss(NanoGPT):
        def forward(self, idx):
            logits = super().forward(idx)
            idx[idx % 2 == 0] = -100
            return logits

    ids = token_batch()["input_ids"]
    geometry = observed(WithLoss(), {"idx": ids.clone()})
    for layer in ("block.02", "final_norm"):
        assert torch.equal(rows_seen(geometry, layer)[1], ids.flatten())
