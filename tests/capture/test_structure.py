"""Which table has the tokens, which modules are the blocks, and which is the final norm."""

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from embedgeo.capture.forward_inputs import ForwardInputs
from embedgeo.capture.structure import token_embeddings
from tests.models import VOCABULARY, Block, NanoGPT, Titan, gpt_neox, llama, token_batch
from tests.observed import layer_names, observed, rows_seen

# ── Tables
# ──────────────────────────────────────────────────────────────────────────────────────────────────


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
        (Tables(pos=9, b=64, head=9, tied="pos"), ["pos", "b"]),
        (Tables(a=64, b=9, head=9, tied="b"), ["a", "b"]),
        (Tables(source_tokens=9, target_tokens=9, head=9), ["source_tokens", "target_tokens"]),
        (Tables(a=9, b=64), ["a", "b"]),
        (Tables(wpe=64), []),
        (Tables(), []),
    ],
)
def test_the_table_of_tokens_is_told_by_names_and_the_head(model, expected):
    assert token_embeddings(model) == [getattr(model, name) for name in expected]


def test_a_weight_that_each_look_at_changes_is_left_alone():
    model = NanoGPT()
    head = nn.utils.parametrizations.spectral_norm(model.lm_head)
    before = [each.clone() for each in head.buffers()]
    observed(model.eval(), {"idx": token_batch()["input_ids"]})
    ForwardInputs(model.train())
    assert all(map(torch.equal, head.buffers(), before))


def test_one_model_under_two_names_is_one():
    model = gpt_neox()  # as Fabric has it on several ranks
    named = nn.ModuleDict({"wrapper": nn.Sequential(model), "original": model})
    named.forward = model.forward
    rows, _ = rows_seen(observed(named, token_batch()), "block.01")
    assert rows.shape == (48, 16)


def test_of_tables_that_nothing_tells_apart_the_ids_must_fit():
    model, ids = Tables(a=VOCABULARY, b=64), token_batch()["input_ids"]
    positions = torch.arange(12)
    assert torch.equal(
        rows_seen(observed(model, {"a": ids, "b": positions}), "block.01")[1], ids.flatten()
    )
    with pytest.raises(ValueError, match=r"several tensors of other ids fit.*Give token_ids="):
        observed(model, {"a": ids, "b": positions.expand(4, 12)})


# ── Blocks
# ──────────────────────────────────────────────────────────────────────────────────────────────────


class OfLists(nn.Module):
    """Blocks as in vit-pytorch and x-transformers: lists of modules."""

    def __init__(self):
        super().__init__()
        self.token_emb = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(16), Block(16)]) for _ in range(3))

    def forward(self, ids):
        x = self.token_emb(ids)
        for norm, block in self.layers:
            x = x + block(norm(x))
        return x


def test_blocks_that_are_lists_or_cut_into_several_are_refused_and_patterns_measured():
    cut = nn.ModuleDict(
        {
            "norms": nn.ModuleList(nn.LayerNorm(4) for _ in range(2)),
            "attentions": nn.ModuleList(nn.MultiheadAttention(4, 1) for _ in range(2)),
        }
    )
    mlps = nn.ModuleList(nn.Sequential(nn.Linear(4, 99)) for _ in range(2))
    for model in (OfLists(), cut, nn.ModuleDict({**cut, "norms": mlps})):
        with pytest.raises(ValueError, match=r"found none in .* Name layers by a pattern"):
            layer_names(model)
    ids = token_batch()["input_ids"]
    rows, seen = rows_seen(observed(OfLists(), {"ids": ids}, "layers.*.0"), "layers.00.00")
    assert len(rows) == ids.numel()
    assert torch.equal(seen, ids.flatten())


def blocks(count):
    return nn.ModuleList(Block(16) for _ in range(count))


class MHABlock(nn.Module):
    """Has norms that are functions, and a class of attention that is not called so."""

    def __init__(self):
        super().__init__()
        self.mha, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.mlp(self.mha(x))


def bare(count):
    return nn.ModuleList(MHABlock() for _ in range(count))


class AttentionEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = blocks(4)


@pytest.mark.parametrize(
    "lists",
    [
        {"layers": blocks(3), "moe_layers": blocks(2)},
        {"visual": nn.ModuleDict({"blocks": blocks(3)}), "blocks": blocks(2)},
        {"layers": blocks(2), "mtp": nn.ModuleList([nn.Sequential(Block(16), nn.Linear(16, 999))])},
        {"down": bare(3), "up": bare(3)},
        {"teacher": gpt_neox(), "student": gpt_neox()},
        {"layers": bare(4), "heads": blocks(3)},
        {"encoder": AttentionEncoder(), "post": blocks(2)},
        {"trunk": blocks(3), "inner": nn.Transformer(16, 2, 1, 1, 32, batch_first=True)},
    ],
)
def test_of_several_lists_of_blocks_none_is_guessed(lists):
    with pytest.raises(
        ValueError, match=r"has .*, .* side by side\. Choose one: layers=(\"\w+|lambda)"
    ):
        layer_names(nn.ModuleDict(lists))


class TwoTowers(hf.PreTrainedModel):
    """One of a user's own, of whose towers the configuration tells nothing."""

    config_class = hf.PreTrainedConfig

    def __init__(self):
        super().__init__(hf.PreTrainedConfig(num_hidden_layers=2))
        self.image, self.text = blocks(3), blocks(2)


def test_of_several_lists_in_a_pretrained_model_of_ones_own_none_is_guessed():
    with pytest.raises(ValueError, match=r"TwoTowers has image, text side by side"):
        layer_names(TwoTowers())


def test_lists_of_tables_and_inside_of_blocks_are_not_the_blocks():
    model = NanoGPT()
    expected = layer_names(model)
    for block in model.transformer.h:
        block.experts = blocks(3)
    model.tables = nn.ModuleList(nn.Embedding(9, 16) for _ in range(3))
    assert layer_names(model) == expected
    model.transformer.h.append(nn.LayerNorm(16))  # then they are of several types
    with pytest.raises(ValueError, match="found none"):
        layer_names(model)
    batch = {"idx": token_batch()["input_ids"]}
    rows, _ = rows_seen(observed(model, batch, "transformer.h.??"), "transformer.h.01")
    assert len(rows) == batch["idx"].numel()
    heads = nn.MultiheadAttention(16, 2)
    heads.own = blocks(3)
    with pytest.raises(ValueError, match="found none"):
        layer_names(nn.ModuleDict({"attention": heads}))


def test_experts_of_blocks_that_are_in_no_list_are_not_the_blocks():
    block = nn.ModuleDict({"attn": nn.MultiheadAttention(4, 1), "experts": bare(3)})
    for model in (nn.Sequential(block, block), nn.ModuleDict({"block": block})):
        with pytest.raises(ValueError, match="found none"):
            layer_names(model)
    assert "block.03" in layer_names(AttentionEncoder())


# ── The final norm
# ──────────────────────────────────────────────────────────────────────────────────────────────────


class Norms(Titan):
    """Has its blocks and norms in one order, and calls them in another one."""

    def __init__(self, names):
        super().__init__()
        for name in names.split():
            self.add_module(name, self._modules.pop(name, nn.RMSNorm(16)))

    def forward(self, ids, names):
        x = self.tok_embeddings(ids)
        for name in names.split():
            for module in self.layers.values() if name == "layers" else [getattr(self, name)]:
                x = module(x)


@pytest.mark.parametrize(
    ("defined", "called", "why_not"),
    [
        ("layers norm other", "layers norm other", ""),  # MAE, token prediction
        ("other norm layers", "other layers norm", ""),
        ("norm layers", "norm layers", "the next norm after"),  # wav2vec 2.0
        ("layers norm", "layers norm norm", "the next norm after"),  # deep supervision
        ("layers norm", "layers pool norm", "of pooled rows"),
        ("layers norm", "layers head norm", "what the last block returns"),  # BERT's, by hand
    ],
)
def test_the_final_norm_is_the_next_one_after_the_blocks(defined, called, why_not):
    model, states = Norms(defined), []
    model.pool, model.head = nn.AdaptiveAvgPool2d((1, 16)), nn.Linear(16, 16)
    model.norm.register_forward_hook(lambda *call: states.append(call[-1]))
    batch, layers = {"ids": token_batch()["input_ids"], "names": called}, ["block.02", "final_norm"]
    if why_not:
        with pytest.warns(UserWarning, match=f"'final_norm' .*{why_not}"):
            assert [*observed(model, batch, layers).compute()] == ["block.02"]
    else:
        rows, _ = rows_seen(observed(model, batch, layers), "final_norm")
        assert torch.equal(rows, states[-1].flatten(0, 1))


class NormLinear(nn.Linear):
    """Has norms of weights."""


@pytest.mark.parametrize("head", [weight_norm(nn.Linear(16, 16)), NormLinear(16, 16)])
def test_a_norm_of_weights_is_no_norm_of_states(head):
    model = Norms("layers")
    model.norm, model.head = None, head
    assert layer_names(model) == ["embed", "block.00", "block.01", "block.02"]


def test_what_makes_a_weight_is_no_stack_beside_the_blocks():
    model = llama()
    weight_norm(model.model.embed_tokens)
    for layer in model.model.layers:
        weight_norm(layer.mlp.down_proj)
    assert [*observed(model, token_batch()).compute()] == layer_names(llama())
