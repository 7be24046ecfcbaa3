"""Which table has the tokens, which modules are the blocks, and which is the final norm."""

import pytest
import torch
import transformers as hf
from torch import nn

from embedgeo import observe
from embedgeo.capture.structure import token_embeddings
from tests.models import VOCABULARY, Block, NanoGPT, Titan, token_batch
from tests.observed import Rows, layer_names, observed, rows_seen

# ── Tables
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_ids_that_count_up_from_zero_are_ids():
    ids = torch.arange(12).expand(2, 12)
    with observe(NanoGPT()) as geometry:
        geometry.model(ids)
    assert geometry.compute()["block.01"]["token_types"] == 12
    assert geometry.compute()["block.01"]["V_W"] >= 0


class Tables(nn.Module):
    """Adds up one embedding a table, given its ids; two blocks; a head, tied or not."""

    def __init__(self, *, head=None, tied=None, **sizes):
        super().__init__()
        for name, size in sizes.items():
            self.add_module(name, nn.Embedding(size, 16))
        self.names = list(sizes)
        self.blocks = nn.ModuleList([Block(16), Block(16)])
        if head is not None:
            self.head = nn.Linear(16, head, bias=False)
        if tied is not None:
            self.head.weight = getattr(self, tied).weight

    def forward(self, **ids):
        x = sum(getattr(self, name)(ids[name]) for name in self.names)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Tables(embedding=9, pos=64), ["embedding"]),
        (Tables(position_embedding_table=64, token_embedding_table=9), ["token_embedding_table"]),
        (
            Tables(token_type_embeddings=2, word_embeddings=9, position_embeddings=64),
            ["word_embeddings"],
        ),
        (Tables(tokEmb=9, posEmb=64, segEmb=3), ["tokEmb"]),
        (Tables(a=9, b=64, head=9, tied="a"), ["a"]),
        (Tables(pos=9, b=64, head=9, tied="pos"), ["pos"]),
        (Tables(a=64, b=9, head=9), ["b"]),
        (Tables(source_tokens=9, target_tokens=9, head=9), ["source_tokens", "target_tokens"]),
        (Tables(a=9, b=64), ["a", "b"]),
        (Tables(wpe=64), []),
        (Tables(), []),
    ],
)
def test_the_table_of_tokens_is_told_by_names_and_the_head(model, expected):
    assert token_embeddings(model) == [getattr(model, name) for name in expected]


def test_of_tables_that_nothing_tells_apart_the_ids_must_fit_or_be_given():
    model, ids = Tables(a=VOCABULARY, b=64), token_batch()["input_ids"]
    positions = torch.arange(12)
    assert torch.equal(
        rows_seen(observed(model, {"a": ids, "b": positions}), "block.01")[1], ids.flatten()
    )
    with pytest.raises(
        ValueError, match=r"2 embedding tables are called with ids that fit.*Give token_ids="
    ):
        observed(model, {"a": ids, "b": positions.expand(4, 12)})
    geometry = observed(
        model, {"a": ids, "b": positions.expand(4, 12)}, token_ids=lambda batch: batch["a"]
    )
    assert torch.equal(rows_seen(geometry, "block.01")[1], ids.flatten())


# ── Blocks
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_blocks_in_a_module_dict():
    model, ids = Titan().eval(), token_batch()["input_ids"]
    assert layer_names(model) == ["embed", "block.00", "block.01", "block.02", "final_norm"]
    geometry = observed(model, {"tokens": ids})
    x = model.tok_embeddings(ids)
    for i in range(3):
        x = model.layers[str(i)](x)
        rows, seen = rows_seen(geometry, f"block.0{i}")
        assert torch.equal(rows, x.flatten(0, 1))
        assert torch.equal(seen, ids.flatten())
    assert len(layer_names(Titan([4, 5]))) == 4


@pytest.mark.parametrize("layers", ["blocks", "block.01", "*.mlp"])
def test_an_entry_of_a_list_may_be_none(layers):
    model = NanoGPT()
    before = layer_names(model, layers)
    model.skips = nn.ModuleList([None, nn.Linear(2, 2), None])
    model.transformer.h.append(None)
    assert layer_names(model, layers) == before


class Attention(nn.Module):
    """Causal attention; as vit-pytorch builds it, with its norm inside."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.norm, self.attend = norm(16), nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x, mask=None):
        x = self.norm(x)
        return self.attend(x, x, x, need_weights=False)[0]


class FeedForward(nn.Sequential):
    def __init__(self, norm=nn.LayerNorm):
        super().__init__(norm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


class Pairs(nn.Module):
    """Blocks as in vit-pytorch: lists of an attention and a feed-forward, with or without a norm
    after the last.
    """

    def __init__(self, has_norm):
        super().__init__()
        self.norm = nn.LayerNorm(16) if has_norm else nn.Identity()
        self.layers = nn.ModuleList(nn.ModuleList([Attention(), FeedForward()]) for _ in range(3))

    def forward(self, x):
        self.states = [x]
        for attention, feed_forward in self.layers:
            x = attention(x) + x
            x = feed_forward(x) + x
            self.states.append(x)
        return self.norm(x)


class Residual(nn.Module):
    def forward(self, x, residual):
        return x + residual


class Sublayers(nn.Module):
    """Blocks as in x-transformers: lists of a list of norms, of which some are None, a sublayer and
    its residual.
    """

    def __init__(self, kind):
        super().__init__()
        has_norm = {"pre": (1, 0, 0), "sandwich": (1, 1, 0), "post": (0, 0, 1)}[kind]
        self.layers = nn.ModuleList()
        for i in range(4):
            norms = nn.ModuleList([nn.LayerNorm(16) if each else None for each in has_norm])
            inner = FeedForward(nn.Identity) if i % 2 else Attention(nn.Identity)
            self.layers.append(nn.ModuleList([norms, inner, Residual()]))
        self.final_norm = nn.Identity() if kind == "post" else nn.LayerNorm(16)

    def forward(self, x, mask=None):
        self.states = [x]
        for (before, branch, after), inner, residual in self.layers:
            out = inner(x if before is None else before(x))
            x = residual(out if branch is None else branch(out), x)
            x = x if after is None else after(x)
            self.states.append(x)
        return self.final_norm(x), self.states


class OfLists(nn.Module):
    """A language model of such blocks."""

    def __init__(self, blocks):
        super().__init__()
        torch.manual_seed(0)
        self.token_emb, self.attn_layers = nn.Embedding(VOCABULARY, 16), blocks
        self.to_logits = nn.Linear(16, VOCABULARY)

    def forward(self, ids):
        out = self.attn_layers(self.token_emb(ids) + torch.arange(ids.shape[1])[:, None] / 8)
        return self.to_logits(out[0] if isinstance(out, tuple) else out)


OF_LISTS = {
    "vit-pytorch": lambda: Pairs(has_norm=True),
    "vit-pytorch, without a norm": lambda: Pairs(has_norm=False),
    "x-transformers, pre": lambda: Sublayers("pre"),
    "x-transformers, sandwich": lambda: Sublayers("sandwich"),
    "x-transformers, post": lambda: Sublayers("post"),
}


@pytest.mark.parametrize("name", OF_LISTS)
def test_the_hidden_states_of_blocks_that_are_lists_are_those_between_them(name):
    model, ids = OfLists(OF_LISTS[name]()), token_batch()["input_ids"]
    blocks = model.attn_layers
    num = len(blocks.layers)
    has_norm = isinstance(getattr(blocks, "norm", None) or blocks.final_norm, nn.LayerNorm)
    names = ["embed", *(f"block.{i:02}" for i in range(num)), *["final_norm"] * has_norm]
    assert layer_names(model) == names
    layers = ["blocks", "mean(last2)"]
    with observe(model, layers, lambda dim: [Rows(dim)]) as geometry, torch.no_grad():
        model(ids)
        model(ids)  # a forward pass begins anew
    for layer, state in zip(names, blocks.states, strict=False):
        rows, seen = rows_seen(geometry, layer)
        assert torch.equal(rows, state.flatten(0, 1).repeat(2, 1)), layer
        assert torch.equal(seen, ids.flatten().repeat(2))
    mean = torch.stack(blocks.states[-2:]).mean(0).flatten(0, 1)
    torch.testing.assert_close(rows_seen(geometry, "mean(last2)")[0], mean.repeat(2, 1))
    hidden = [f"hidden.{i:02}" for i in range(num + 1)]
    assert layer_names(model, "hidden_states") == hidden
    with observe(model, "hidden_states", lambda dim: [Rows(dim)]) as geometry, torch.no_grad():
        model(ids)
    assert torch.equal(rows_seen(geometry, hidden[1])[0], blocks.states[1].flatten(0, 1))


def test_a_norm_of_embeddings_is_final_where_it_follows_the_blocks():
    size = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
    }
    config = hf.Lfm2Config(
        vocab_size=VOCABULARY, num_hidden_layers=2, layer_types=["conv", "full_attention"], **size
    )
    model, ids = hf.Lfm2ForCausalLM(config).eval(), token_batch()["input_ids"]
    assert layer_names(model) == ["embed", "block.00", "block.01", "final_norm"]
    with torch.no_grad():
        last = model(ids, output_hidden_states=True).hidden_states[-1]
    rows, seen = rows_seen(observed(model, {"input_ids": ids}), "final_norm")
    assert torch.equal(rows, last.flatten(0, 1))
    assert torch.equal(seen, ids.flatten())
