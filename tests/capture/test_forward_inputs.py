"""Token ids and masks of padded and packed sequences, with a cache, and of several batches in one
forward pass.
"""

import pytest
import torch
from torch import nn

from embedgeo import observe
from tests.models import FAMILIES, gpt_neox, token_batch
from tests.observed import Rows, hidden_states, observed, rows_seen


def test_first_positions_are_those_of_every_packed_sequence():
    model, ids = gpt_neox().eval(), token_batch(rows=2, length=12)["input_ids"]
    lengths = [[5, 4, 3], [1, 11]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    geometry = observed(
        model, {"input_ids": ids, "position_ids": positions}, skip_first_positions=2
    )
    expected = [
        token
        for row, parts in zip(ids, lengths, strict=True)
        for sequence in row.split(parts)
        for token in sequence[2:].tolist()
    ]
    assert rows_seen(geometry, "block.01")[1].tolist() == expected


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
    with observe(model, metrics=lambda dim: [Rows(dim)]) as geometry:
        model(**batch)
        model(**embedded)  # what the first pass was given does not hold for the second
    rows, ids = rows_seen(geometry, "block.00")
    assert len(ids) == mask.sum()
    assert len(rows) == mask.sum() + mask.numel()


def test_a_mask_of_four_dimensions_says_nothing_of_padding():
    model, batch = FAMILIES["bert"].build().eval(), token_batch(padding="right")
    keep = batch["attention_mask"].bool()
    whole = keep[:, None, None, :] & keep[:, None, :, None]
    masked = {"input_ids": batch["input_ids"], "attention_mask": whole}
    assert len(rows_seen(observed(model, masked), "block.00")[0]) == keep.numel()
    with observe(model) as geometry, torch.no_grad():
        geometry.probe.mask = keep
        model(**masked)
    assert geometry.compute()["block.00"]["n"] == keep.sum()


# from transformers 5.24 on
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_what_a_cache_holds_is_not_counted_again():
    model, batch = gpt_neox().eval(), token_batch(padding="left", length=10)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with (
        observe(model, metrics=lambda dim: [Rows(dim)], skip_first_positions=3) as geometry,
        torch.no_grad(),
    ):
        first = model(input_ids=ids[:, :6], attention_mask=mask[:, :6])
        model(input_ids=ids[:, 6:], attention_mask=mask, past_key_values=first.past_key_values)
    kept = mask.bool() & (mask.cumsum(1) > 3)
    expected = torch.cat([ids[:, :6][kept[:, :6]], ids[:, 6:][kept[:, 6:]]])
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


def test_each_of_two_views_has_its_own_padding():
    first, second = token_batch(seed=1, padding="left"), token_batch(seed=2, padding="right")
    views = [(batch["input_ids"], batch["attention_mask"] == 0) for batch in (first, second)]
    third = token_batch(seed=3)["input_ids"]
    with (
        observe(TwoViews().eval(), ["blocks", "head"], lambda dim: [Rows(dim)]) as geometry,
        torch.no_grad(),
    ):
        geometry.model(*views, (third, None))
    kept = [batch["input_ids"][batch["attention_mask"].bool()] for batch in (first, second)]
    for layer in ("embed", "block.01", "head"):
        assert torch.equal(rows_seen(geometry, layer)[1], torch.cat([*kept, third.flatten()]))
