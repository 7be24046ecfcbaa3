"""The right rows of the right call: models that call modules several times, turn, pad or pack what
they are given, against their own states.
"""

import warnings
from collections import namedtuple
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import transformers as hf
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import embedgeo
from embedgeo import EmbeddingMoments, observe
from embedgeo.training.plan import sources_of_rows
from tests.models import NanoGPT, gpt_neox, llama, t5, token_batch

KEYS = "n", "Q", "M"


def moments(rows):
    x = rows.detach().double().reshape(-1, rows.shape[-1])
    return {
        "n": float(len(x)),
        "Q": x.square().sum(1).mean().item(),
        "M": x.mean(0).square().sum().item(),
    }


def assert_equal(values, rows):
    found = {key: values[key] for key in KEYS}
    assert found == pytest.approx(moments(rows), rel=1e-4, abs=1e-9)


def measured(model, *args, layers="blocks", **kwargs):
    with torch.no_grad(), observe(model, layers=layers) as geometry:
        model(*args, **kwargs)
    return geometry.compute()


def ids_of(batch=4, length=9, vocabulary=40, seed=0):
    return torch.randint(5, vocabulary, (batch, length), generator=torch.manual_seed(seed))


def test_a_norm_that_the_training_step_calls_on_inner_states_does_not_count():
    model, ids = llama(), ids_of()
    monitor = embedgeo.StepMonitor(model, every_n_steps=1, measure_last=False)
    with monitor.step(0, {"input_ids": ids}):
        out = model(input_ids=ids, labels=ids, output_hidden_states=True)
        inner = out.hidden_states[1:-1]
        (out.loss + sum(model.lm_head(model.model.norm(h)).mean() for h in inner)).backward()
    monitor.close()
    found = {r["metric"]: r["value"] for r in monitor.history if r["layer"] == "final_norm"}
    assert_equal(found, out.hidden_states[-1])


def test_several_residual_streams_are_left_out_and_the_others_measured():
    class Parallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(50, 16)
            self.blocks = nn.ModuleList(Added(16) for _ in range(2))
            self.norm = nn.LayerNorm(16)

        def forward(self, input_ids):
            x = self.wte(input_ids).expand(2, -1, -1, -1)
            for block in self.blocks:
                x = block(x)
            self.last = self.norm(x.mean(0))

    model = Parallel()
    with pytest.warns(UserWarning, match=r"Layer '.*' has several residual streams"):
        values = measured(model, ids_of())
    assert values.keys() == {"final_norm"}
    assert_equal(values["final_norm"], model.last)


@pytest.mark.filterwarnings("ignore:No forward pass reached")
def test_function_transforms_are_refused_in_a_sentence():
    model, ids = NanoGPT().eval(), ids_of()

    def loss(weights):
        return torch.func.functional_call(model, weights, (ids,)).mean()

    weights = dict(model.named_parameters())
    with observe(model) as geometry:
        with pytest.raises(ValueError, match=r"torch\.func"):
            torch.func.grad(loss)(weights)
        stacked = {name: torch.stack([each, each]) for name, each in weights.items()}
        with pytest.raises(ValueError, match=r"torch\.func"):
            torch.func.vmap(loss, randomness="same")(stacked)
    assert geometry.records() == []


# ── Random models
# ─────────────────────────────────────────────────────────────────────────────────────────────────


class Added(nn.Module):
    """A block that adds to what it is given."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.dense(self.norm(x))


class RandomModel(nn.Module):
    """Blocks called in any order, with prompts, padding, turned rows, heads and norms besides."""

    def __init__(self, plan):
        super().__init__()
        torch.manual_seed(plan["seed"])
        self.plan = plan
        self.table = nn.Embedding(20, 6)
        self.blocks = nn.ModuleList(Added(6) for _ in range(plan["num_blocks"]))
        self.final = nn.LayerNorm(6)
        self.heads = nn.ModuleList(nn.Linear(6, 90) for _ in range(plan["num_heads"]))

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        plan = self.plan
        ids = nn.functional.pad(input_ids, (plan["prompt"], plan["padding"]), value=1)
        if plan["turns"] == "ids":
            x = self.table(ids.T.contiguous())
        else:
            x = self.table(ids)
            x = x.transpose(0, 1) if plan["turns"] == "rows" else x
        x = self.final(x) if plan["norm_first"] else x
        self.states = []
        for i in plan["calls"]:
            if i == 0:
                self.states.append(("embed", x))
            x = self.blocks[i](x)
            self.states.append((f"block.{i:02d}", x))
        x = self.final(x)
        self.states.append(("final_norm", x))
        return [head(x) for head in self.heads]

    def own(self, ids, mask):
        """The rows that count of each hidden state, or None of one that is made several times."""
        found = {}
        for name, state in self.states:
            rows = state.transpose(0, 1) if self.plan["turns"] else state
            found[name] = None if name in found else rows[mask]
        return found


@st.composite
def plans(draw):
    num_blocks = draw(st.integers(1, 4))
    in_order = list(range(num_blocks))
    calls = draw(
        st.one_of(
            st.just(in_order),
            st.permutations(in_order),
            st.lists(st.sampled_from(in_order), min_size=1, max_size=3 * num_blocks),
        )
    )
    return {
        "num_blocks": num_blocks,
        "calls": calls,
        "prompt": draw(st.sampled_from([0, 0, 2])),
        "padding": draw(st.sampled_from([0, 0, 3])),
        "turns": draw(st.sampled_from(["", "", "ids", "rows"])),
        "norm_first": draw(st.booleans()),
        "num_heads": draw(st.integers(0, 4)),
        "outside": draw(st.booleans()),
        "mask": draw(st.sampled_from(["none", "int", "bool", "float", "added"])),
        "packed": draw(st.booleans()),
        "shape": draw(st.tuples(st.integers(3, 5), st.integers(3, 6))),
        "seed": draw(st.integers(0, 100)),
    }


def masks(plan, kept):
    return {
        "none": None,
        "int": kept.long(),
        "bool": kept,
        "float": kept.float(),
        "added": torch.zeros(kept.shape).masked_fill(~kept, -1e9),
    }[plan["mask"]]


@pytest.mark.filterwarnings("ignore:No forward pass reached")
@settings(max_examples=40, deadline=None)
@given(plans())
def test_random_models_are_measured_right_or_refused(plan):
    model = RandomModel(plan)
    ids = torch.randint(5, 20, plan["shape"])
    kept = torch.ones(plan["shape"], dtype=torch.bool)
    if plan["mask"] != "none":
        kept[0, -1] = kept[1, 0] = False
    positions = torch.arange(ids.shape[1]) % (2 if plan["packed"] else 100)
    with torch.no_grad(), observe(model, metrics=lambda d: [EmbeddingMoments(d)]) as geometry:
        refusal = ""
        try:
            model(ids, attention_mask=masks(plan, kept), position_ids=positions[None])
        except ValueError as error:
            refusal = str(error)
        else:
            states = model.own(ids, kept)
        if plan["outside"] and not refusal:
            model.final(torch.randn(2, 3, 6))
    if refusal:
        assert "layer '" in refusal or "the embedding table must" in refusal
        is_usual = plan["calls"] == list(range(plan["num_blocks"]))
        assert not is_usual or plan["turns"] or plan["prompt"] or plan["padding"], refusal
        return
    assert plan["turns"] != "ids"
    assert not plan["prompt"]
    assert not plan["padding"]
    for name, values in geometry.compute().items():
        if name == "final_norm":
            *_, (_, state) = model.states
            rows = state.transpose(0, 1) if plan["turns"] else state
            assert_equal(values, rows[kept])
        else:
            assert states[name] is not None, name
            assert_equal(values, states[name])


class Small(nn.Module):
    """A model that may turn its states, and change its token ids."""

    def __init__(self, *, turns=False, change=lambda ids: ids):
        super().__init__()
        self.word, self.turns, self.change = nn.Embedding(64, 8), turns, change
        self.layers = nn.ModuleList([Added(8), Added(8)])

    def forward(self, ids, padding_mask=None, **positions):
        x = self.word(self.change(ids))
        x = x.transpose(0, 1) if self.turns else x
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("layers", ["block.01", "layers.00"])
def test_states_that_look_turned_are_refused_at_any_layer(layers):
    ids = torch.arange(36).view(6, 6)
    unlike = Small()
    unlike.word = nn.Sequential(nn.Embedding(64, 4), nn.Linear(4, 8))  # nothing tells the order
    for model in (Small(turns=True), unlike):
        with pytest.raises(ValueError, match="its rows may be turned"):
            measured(model, ids, layers=layers)
    model = Small()
    for block in model.layers:  # whose states are not like the embeddings
        block.dense.weight.data *= 100
    assert [values["n"] for values in measured(model, ids, layers=layers).values()] == [36]


def test_the_order_of_rows_is_read_without_a_trace_in_the_graph():
    model = Small()
    model.layers = nn.ModuleList(map(checkpoint_wrapper, model.layers))
    with embedgeo.StepMonitor(model, every_n_steps=1, on_error="raise") as monitor, monitor.step(0):
        model(torch.arange(36).view(6, 6)).sum().backward()
    assert monitor.history


class Whole(Small):
    """Takes its batch as one argument."""

    def forward(self, batch):
        return super().forward(batch["ids"] if isinstance(batch, dict) else batch.ids)


class NamedBatch(NamedTuple):
    ids: torch.Tensor
    attention_mask: torch.Tensor


@dataclass(slots=True)
class DataBatch:
    ids: torch.Tensor
    attention_mask: torch.Tensor


@pytest.mark.parametrize("kind", [dict, NamedBatch, DataBatch, SimpleNamespace])
def test_the_mask_of_a_batch_that_is_one_argument_is_read(kind):
    ids = torch.arange(12).view(3, 4)
    values = measured(Whole(), kind(ids=ids, attention_mask=ids > 5))
    assert values["block.01"]["n"] == 6


@pytest.mark.parametrize("kind", ["Siglip", "CLIP"])
def test_rows_of_images_are_not_those_of_as_many_tokens(kind):
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    length = 16 + (kind == "CLIP")
    text = {**shape, "intermediate_size": 16, "vocab_size": 30, "max_position_embeddings": length}
    image = {**shape, "intermediate_size": 16, "image_size": 16, "patch_size": 4}
    config = getattr(hf, f"{kind}Config")(text_config=text, vision_config=image)
    model = getattr(hf, f"{kind}Model")(config).eval()
    ids = torch.randint(30, (2, length))
    batch = {"input_ids": ids, "attention_mask": (torch.arange(length) < 9).expand(2, -1).long()}
    batch["pixel_values"] = torch.randn(2, 3, 16, 16)
    with torch.no_grad(), observe(model) as geometry:
        model(**batch)
    values = geometry.compute()["block.01"]
    assert (values["n"], values["token_types"]) == (18, len(ids[:, :9].unique()))
    of_ids, _ = sources_of_rows(geometry, has_ids=True, ids=False, mask=False)
    assert of_ids.endswith("token_embedding (vision_model beside the text: not measured)")
    for layers in "vision_model.encoder.layers.0", "vision_model.*.mlp":
        with pytest.raises(ValueError, match="beside the blocks of the text"):
            measured(model, **batch, layers=layers)
    values = measured(model, **batch, layers=lambda whole: whole.vision_model)
    assert values["block.01"]["n"] == 2 * length


KEEP = torch.arange(4) < torch.tensor([4, 2, 3])[:, None]


class Masked(Small):
    """Takes token ids or embeddings, and masks."""

    def forward(self, x, attention_mask=None, **masks):
        if not x.is_floating_point():
            return super().forward(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("is_embedded", [False, True])
@pytest.mark.parametrize(
    "shape", [(3, 4), (3, 1, 1, 4), (3, 4, 1), (12,), (4, 3), (3, 1, 4, 4), (3, 4, 4), (6, 4, 4)]
)
@pytest.mark.parametrize(
    "name", ["mask", "padding_mask", "input_mask", "attn_mask", "is_pad", "look_ahead_mask"]
)
def test_a_mask_that_does_not_tell_which_way_is_refused(name, shape, is_embedded):
    ids = torch.arange(12).view(3, 4)
    x = torch.randn(3, 4, 8) if is_embedded else ids
    pairs = KEEP[:, None, :] & torch.ones(4, 4, dtype=torch.bool).tril()
    of_heads = pairs.repeat_interleave(shape[0] // 3, 0) if shape.count(4) == 2 else KEEP
    mask = of_heads.reshape(shape)
    if name == "mask" and shape[0] == 3 and shape.count(4) == 2:  # whose queries tell it
        assert measured(Masked(), x, mask=mask)["block.01"]["n"] == 9
        return
    rule = f"{name} does not tell whether 1 is padding|must have a row for each token"
    with pytest.raises(ValueError, match=rule):
        measured(Masked(), x, **{name: mask})
    causal = torch.ones(3, 1, 4, 4, dtype=torch.bool).tril()
    values = measured(Masked(), x, loss_mask=ids > 5, causal_mask=causal, attn_mask=causal)
    assert values["block.01"]["n"] == 12


class Keeps(nn.Module):
    """Its blocks' key_padding_mask is 1 for tokens, as flash_attn's, their attention_mask is 0."""

    def __init__(self):
        super().__init__()
        self.inner = Masked()

    def forward(self, ids, attention_mask=None, keep=None):
        if keep is not None:
            return self.inner(ids, attention_mask=keep)
        return self.inner(ids, key_padding_mask=attention_mask)


def test_a_padding_mask_of_others_is_not_taken_for_torchs():
    ids = torch.arange(12).view(3, 4)
    assert measured(Keeps(), ids, attention_mask=KEEP)["block.01"]["n"] == 9
    with pytest.raises(ValueError, match="does not tell whether 1 is padding"):
        measured(Keeps().inner, ids, key_padding_mask=KEEP)
    with pytest.raises(ValueError, match="of padding is 1 where another one is 0"):
        measured(Keeps(), ids, attention_mask=KEEP, keep=~KEEP)


def test_layers_by_name_are_of_the_model_that_has_them():
    both = nn.ModuleDict({"first": gpt_neox(), "second": gpt_neox()})
    first, second = (token_batch(seed=seed, padding="right") for seed in (1, 2))
    second["attention_mask"] = second["attention_mask"].flip(0)
    block = both["second"].gpt_neox.layers[1]
    values = []
    for layers in (lambda m: {"x": block}, lambda m: m["second"]):
        with torch.no_grad(), observe(both, layers) as geometry:
            both["first"](**first)
            both["second"](**second)
        values.append(geometry.compute())
    assert values[0]["x"] == pytest.approx(values[1]["block.01"], nan_ok=True)
    with pytest.raises(ValueError, match="first, second side by side"):
        observe(both, lambda m: {"x": block, "y": m["first"].gpt_neox}).__enter__()
    with pytest.raises(ValueError, match="must be in the first of several models"):
        observe(both, [lambda m: {"x": block}]).__enter__()


def test_a_mask_of_one_text_without_a_batch_is_refused():
    ids = torch.arange(7)
    with pytest.raises(ValueError, match=r"attention_mask, of shape \(7,\), does not tell"):
        measured(Masked(), ids, attention_mask=ids < 5)


class Encodes(nn.Module):
    """Encodes texts whose table is outside of the encoder, in one call."""

    def __init__(self):
        super().__init__()
        self.encoder = Masked()
        self.word = self.encoder._modules.pop("word")

    def forward(self, attributes, attention_mask, input_ids=None, **masks):
        x = self.word(attributes if input_ids is None else input_ids)
        return self.encoder(x, **masks)


class Twice(Encodes):
    """Encodes two texts in one call."""

    def forward(self, ids, others, mask):
        return [self.encoder(self.word(each)) for each in (ids, others)]


def test_a_mask_is_of_the_ids_that_it_is_given_with_and_speaks_for_no_other():
    ids = torch.arange(12).view(3, 4)
    for mask in KEEP, ~KEEP, KEEP[:, None, None]:
        assert measured(Encodes(), ids, KEEP, pad_mask=mask)["block.01"]["n"] == 9
    with pytest.raises(ValueError, match="attention_mask is of other token ids than the rows"):
        measured(Encodes(), ids, KEEP, ids.flip(0))
    asked = pytest.raises(ValueError, match="of one forward pass of a batch; another one had other")
    with asked, torch.no_grad(), observe(Twice(), mask=lambda batch: batch["mask"]) as geometry:
        geometry.model(ids, ids.flip(0), mask=KEEP)
    with pytest.raises(ValueError, match="argument second_mask does not tell"):
        measured(Encodes(), ids, KEEP, second_mask=KEEP.flip(0))
    causal = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    for name in "attention_mask", "mask":
        for mask in causal, causal[0].log():
            with pytest.raises(ValueError, match="argument padding_mask does not tell"):
                measured(Masked(), ids, **{name: mask}, padding_mask=~KEEP)
            assert measured(Masked(), ids, **{name: mask})["block.01"]["n"] == 12
    with pytest.raises(ValueError, match="argument src_key_padding_mask does not tell"):
        measured(Masked(), ids, src_key_padding_mask=~KEEP[:, None, None])


class OfAnyShape(Masked):
    """Takes inputs of any shape, which have rows of some axes."""

    def __init__(self, axes):
        super().__init__()
        self.axes = axes

    def forward(self, x, **masks):
        others = [i for i in range(x.ndim) if i not in self.axes]
        rows = x.mean(others) if others else x
        return super().forward(rows[..., None] * torch.ones(8))


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((3, 4), (0, 1)), ((3, 5, 4), (0, 2)), ((3, 1, 4, 5), (0, 2)), ((12,), (0,))],
)
@pytest.mark.parametrize("name", ["mask", "padding_mask", "target_mask", "valid"])
def test_a_mask_of_rows_is_seen_whatever_the_shape_of_the_inputs(shape, axes, name):
    mask = KEEP if len(axes) == 2 else KEEP.flatten()
    with pytest.raises(ValueError, match=f"argument {name} does not tell whether 1 is padding"):
        measured(OfAnyShape(axes), torch.randn(shape), **{name: mask})
    given = {"attention_mask": mask} if len(axes) == 2 else {}
    n = measured(OfAnyShape(axes), torch.randn(shape), **given)["block.01"]["n"]
    assert n == (9 if given else 12)


@pytest.mark.parametrize("mask", [KEEP, object()])
def test_a_mask_of_other_rows_or_that_is_no_tensor_is_refused(mask):
    with pytest.raises(ValueError, match="argument frame_mask does not tell"):
        measured(Masked(), torch.randn(3, 5, 8), frame_mask=mask)


def test_a_mask_of_a_part_of_the_sequences_is_refused():
    ids, model = torch.arange(12).view(3, 4), Small(change=lambda ids: ids.repeat(2, 1))
    with pytest.raises(ValueError, match="argument anchor_mask does not tell"):
        measured(model, ids, anchor_mask=KEEP)
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    assert measured(model, ids, attn_mask=causal)["block.01"]["n"] == 24


class OfPairs(Small):
    """Hides padding by a mask of torch's encoder, of pairs for each head."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids):
        hidden = (ids == 0)[:, None].expand(-1, 4, -1).repeat_interleave(2, 0)
        return self.layers(self.word(ids), mask=hidden)


def test_a_mask_of_pairs_that_torchs_encoder_is_given_is_refused_unless_all_are_alike():
    ids, model = torch.arange(12).view(3, 4), OfPairs().eval()
    with pytest.raises(ValueError, match="argument mask does not tell whether 1 is padding"):
        measured(model, ids)
    assert measured(model, ids + 1)["block.01"]["n"] == 12


def test_padding_that_no_mask_tells_is_said():
    model, ids = Small(), torch.tensor([[3, 0, 5, 6], [7, 8, 0, 0]])
    model.word.padding_idx = 0
    with pytest.warns(UserWarning, match="id 0 must be told from tokens by a mask"):
        assert measured(model, ids)["block.01"]["n"] == 8
    assert measured(model, ids[:1])["block.01"]["n"] == 4  # its own token
    assert measured(model, ids, attention_mask=torch.ones_like(ids))["block.01"]["n"] == 8


class Towers(nn.Module):
    """Two encoders of other depths, each called with a mask of its own texts."""

    def __init__(self):
        super().__init__()
        self.deep, self.flat = Masked(), Masked()
        self.deep.layers.append(Added(8))

    def forward(self, texts):
        return [getattr(self, name)(*each) for name, each in texts.items()]


def test_layers_of_a_tower_by_pattern_take_the_mask_of_that_tower():
    ids = torch.arange(12).view(3, 4)
    texts = {"deep": (ids, KEEP), "flat": (ids + 12, KEEP.flip(1))}
    layers = {"deep": "deep.layers.02", "flat": "flat.layers.01"}
    for name, is_one_call, order in product(texts, (True, False), (1, -1)):
        model = Towers()
        of_tower = {"token_ids": lambda texts: texts[name][0]} if is_one_call else {}  # noqa: B023
        names = [*texts][::order]
        with torch.no_grad(), observe(model, layers=[layers[name]], **of_tower) as geometry:
            if is_one_call:
                model({each: texts[each] for each in names})
            else:
                for each in names:
                    getattr(model, each)(*texts[each])
        ids, mask = texts[name]
        with torch.no_grad():
            rows = getattr(model, name)(ids)[mask].double()
        values = geometry.compute()[layers[name]]
        assert values["n"] == len(rows)
        assert values["M"] == pytest.approx(float(rows.mean(0).square().sum()))


def test_a_float_mask_of_pairs_is_no_mask_of_as_many_texts():
    ids, model = torch.arange(1, 17).view(4, 4), OfPairs().eval()
    window = torch.full((4, 4), -torch.inf).triu(1)
    model.forward = lambda ids: model.layers(model.word(ids), mask=window)
    assert measured(model, ids)["block.01"]["n"] == 16


class Captions(Small):
    """A decoder of torch's whose memory is padded, and its texts are not."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerDecoderLayer(8, 2, 8, batch_first=True)
        self.layers = nn.TransformerDecoder(layer, 2)

    def forward(self, ids, memory, hidden):
        return self.layers(self.word(ids), memory, memory_key_padding_mask=hidden)


def test_padding_of_a_memory_is_none_of_the_texts():
    model = Captions().eval()
    hidden = torch.arange(5) > torch.tensor([[4], [2], [3]])
    ids = torch.arange(12).view(3, 4)
    with torch.no_grad(), observe(model) as geometry:
        model(ids, torch.randn(3, 5, 8), hidden)
    assert geometry.compute()["block.01"]["n"] == 12


class Routed(Small):
    """Its blocks return what their router gives, too."""

    class Block(Added):
        first = staticmethod(lambda x: x[..., :3])

        def forward(self, x):
            return self.first(x), super().forward(x)

    class Pooled(Block):
        first = staticmethod(lambda x: x.mean(1))

    def forward(self, ids):
        x = self.word(ids)
        for layer in self.layers:
            _, x = layer(x)
        return x


def test_a_block_whose_state_is_not_the_first_that_it_returns_is_refused():
    for kind, shape in ((Routed.Block, r"3, 4, 3"), (Routed.Pooled, "3, 8")):
        model = Routed()
        model.layers = nn.ModuleList([kind(8), kind(8)])
        for layers in ("blocks", "mean(last1)", "layers.01"):
            with pytest.raises(ValueError, match=rf"returns one of shape \({shape}\) before that"):
                measured(model, torch.arange(12).view(3, 4), layers=layers)


class TakesBatch(Small):
    """Takes a batch that has its token ids somewhere inside."""

    def forward(self, batch, m=None):
        while not isinstance(batch, torch.Tensor):
            batch = batch["x"] if isinstance(batch, dict) else batch[0]
        return super().forward(batch)


def test_what_looks_like_a_mask_and_has_no_name_of_one_is_refused():
    ids = torch.arange(12).view(3, 4)
    bias = torch.where(KEEP, 0.0, -torch.inf)[:, None, None]
    batches = [[ids, KEEP], ((ids, KEEP.long()), ids), {"x": [ids, KEEP.float()]}, [ids, bias]]
    for batch in batches:
        with pytest.raises(ValueError, match=r"\[1\] does not tell whether 1 is padding"):
            measured(TakesBatch(), batch)
    with pytest.raises(ValueError, match="argument m does not tell"):
        measured(TakesBatch(), ids, m=KEEP)
    counted = [[ids, ids + 1], {"x": ids, "labels": KEEP}, {"x": ids, "token_type_ids": KEEP}]
    for batch in counted:
        assert measured(TakesBatch(), batch)["block.01"]["n"] == 12
    assert measured(TakesBatch(), [{"x": {"x": ids, "attention_mask": KEEP}}])["embed"]["n"] == 9


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: ids.T,
        lambda ids: nn.functional.pad(ids, (0, 2)),
        lambda ids: nn.functional.pad(ids, (1, 0)).T,
        lambda ids: ids[[3, 0, 1, 2]],
        lambda ids: ids.flip(1),
    ],
)
def test_token_ids_that_the_model_turns_or_adds_to_are_refused(change):
    ids = torch.arange(16).view(4, 4)
    with pytest.raises(ValueError, match=r"of shape \(4, 4\); the model turns, sorts or pads them"):
        measured(Small(change=change), ids)
    assert measured(Small(change=lambda ids: ids[:, 1:]), ids)["block.01"]["n"] == 12


def test_texts_that_are_looked_up_before_either_is_run_are_not_mixed_up():
    model, (a, b) = Small(), torch.arange(24).view(2, 3, 4) % 7
    with observe(model) as geometry, torch.no_grad():
        for ids in a, b:
            model.layers[1](model.layers[0](model.word(ids)))
    assert geometry.compute()["block.01"]["token_types"] == 7
    refused = pytest.raises(ValueError, match="must have one token id a row; several")
    with refused, observe(model), torch.no_grad():
        one, _ = model.word(a), model.word(b)
        model.layers[0](one)


@pytest.mark.parametrize("order", [(0, 1, 0, 1), (1, 0)])
def test_blocks_that_are_run_outside_of_a_call_are_of_the_look_up_before_them(order):
    model = Small()
    with torch.no_grad(), observe(model, "block.*") as geometry:
        for _ in range(2):
            model.layers[1](model.layers[0](model.word(ids_of())))
        assert geometry.compute()["block.01"]["n"] == 72
        x = model.word(ids_of())
        with pytest.raises(ValueError, match=r"called again|must come before"):
            nn.Sequential(*(model.layers[i] for i in order))(x)


class LooksUp(Small):
    """Looks other ids up besides its own, before its blocks or before its last norm."""

    def __init__(self, place):
        super().__init__()
        self.place, self.norm = place, nn.LayerNorm(8)

    def forward(self, input_ids, others):
        x = self.word(input_ids.clamp(max=20))
        if self.place == 0:
            self.word(others)
        for layer in self.layers:
            x = layer(x)
        if self.place == 1:
            self.word(others)
        return self.norm(x)


@pytest.mark.parametrize(("place", "most"), [(0, 20), (2, 63)])
def test_ids_of_rows_that_nothing_tells_from_others_are_refused_or_given(place, most):
    """Of two look-ups, or where the model has replaced placeholders of what it is given."""
    ids, others = ids_of(vocabulary=most, seed=1), ids_of(vocabulary=20, seed=2)
    with pytest.raises(ValueError, match=r"several tensors of other ids fit.*Give token_ids="):
        measured(LooksUp(place), ids, others)
    with torch.no_grad(), observe(LooksUp(place), token_ids=ids) as geometry:
        geometry.model(ids, others)
    assert geometry.compute()["block.01"]["token_types"] == len(ids.unique())


def test_ids_that_are_looked_up_behind_the_blocks_are_of_no_row():
    ids, others = ids_of(vocabulary=20, seed=1), ids_of(vocabulary=20, seed=2)
    model = LooksUp(1)
    values = measured(model, ids, others), measured(LooksUp(2), ids, others)
    types = [[layer["token_types"] for layer in each.values()] for each in values]
    assert types[0] == types[1] == [len(ids.unique())] * 4
    assert measured(model, ids, others)["embed"]["V_W"] == 0


class Translates(Small):
    """An encoder and a decoder, run inline, with one embedding table."""

    def forward(self, ids, others):
        x = self.layers[0](self.word(ids))
        return self.layers[1](self.word(others) + x)


def test_ids_of_an_encoder_are_not_those_of_its_decoder():
    ids, others = ids_of(vocabulary=20, seed=1), ids_of(vocabulary=20, seed=2)
    model = Translates()
    for names in ("encoder", "decoder"), ("decoder",):
        layers = dict(zip(reversed(names), reversed(model.layers), strict=False))
        with pytest.raises(ValueError, match=r"'decoder'.*several tensors of other ids fit"):
            measured(model, ids, others, layers=lambda _, layers=layers: layers)


def test_embeddings_of_several_look_ups_all_count():
    model = llama().eval()
    table, ids = model.get_input_embeddings(), ids_of()
    parts = [table(ids), torch.randn(4, 5, 16), table(ids[:, :3])]
    with torch.no_grad():
        values = measured(model, inputs_embeds=torch.cat(parts, 1))
    assert values["block.00"]["n"] == 4 * (9 + 5 + 3)
    assert "token_types" not in values["block.00"]


def test_rows_that_images_take_have_no_token_type():
    shape = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    image = hf.CLIPVisionConfig(**shape, image_size=16, patch_size=8, num_hidden_layers=2)
    config = hf.LlavaConfig(vision_config=image, text_config=llama().config, image_token_id=50)
    ids = torch.cat([torch.full((4, 4), 50), ids_of()], 1)
    model, pixels = hf.LlavaForConditionalGeneration(config), torch.randn(4, 3, 16, 16)
    values = measured(model, ids, pixels, layers="embed")["embed"]
    assert [values[key] for key in ("n", "V_W")] == [52, 0]


class Looks(Small):
    """Runs a tower of images, which has more blocks, before it looks up its ids."""

    def __init__(self):
        super().__init__()
        self.images = nn.Sequential(*(nn.TransformerEncoderLayer(8, 1) for _ in "1234"))

    def forward(self, ids, images):
        self.images(images)
        return super().forward(ids)


def test_ids_that_are_looked_up_after_the_images_are_found():
    assert "V_W" in measured(Looks(), ids_of(), torch.ones(4, 5, 8), layers="layers.0")["layers.00"]


class Branches(Small):
    """Its blocks give two tensors of the shape of their input, the second of which is the state."""

    def __init__(self, give):
        super().__init__()

        class Branch(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.dense = nn.LayerNorm(8), nn.Linear(8, 8)

            def forward(self, x):
                return give(99 * self.dense(self.norm(x)), x + 1)

        self.layers = nn.ModuleList([Branch(), Branch()])

    def forward(self, ids):
        x = self.word(ids)
        for layer in self.layers:
            output = layer(x)
            _, x = output.values() if isinstance(output, dict) else output
        return x


@pytest.mark.parametrize(
    "give",
    [
        lambda *two: two,
        lambda *two: dict(zip("ab", two, strict=True)),
        namedtuple("Two", ["branch", "residual"]),
    ],
)
def test_blocks_that_give_a_branch_and_the_residual_stream_are_refused(give):
    with pytest.raises(ValueError, match=r"'block.00' must return one hidden state; its Branch"):
        measured(Branches(give), ids_of())


@pytest.mark.parametrize(
    "give",
    [
        lambda branch, state: {"branch": branch, "hidden_states": state},
        namedtuple("Output", ["branch", "last_hidden_state"]),
    ],
)
def test_of_several_outputs_the_one_that_is_named_so_is_the_hidden_state(give):
    model = Branches(give)
    values = measured(model, ids_of())
    state = (model.word(ids_of()) + 1).detach()
    assert values["block.00"]["Q"] == pytest.approx(float(state.square().sum(-1).mean()), rel=1e-6)


class Conditioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(8, 8)

    def forward(self, context, hidden_states):
        return self.dense(hidden_states) + context


class OnContext(Small):
    """Its blocks are given two inputs of one shape, by name or not."""

    def __init__(self, *, by_name):
        super().__init__()
        self.layers, self.by_name = nn.ModuleList([Conditioned(), Conditioned()]), by_name

    def forward(self, ids):
        x = self.word(ids)
        for layer in self.layers:
            given = {"context": torch.ones_like(x), "hidden_states": x}
            x = layer(**given) if self.by_name else layer(*given.values())
        return x


def test_of_several_inputs_of_a_block_the_first_one_or_a_name_is_what_enters_it():
    model = OnContext(by_name=True)
    assert_equal(measured(model, ids_of())["embed"], model.word(ids_of()))
    with pytest.raises(ValueError, match=r"'embed' must be .* first of which it calls context"):
        measured(OnContext(by_name=False), ids_of())


LENGTHS = [7, 1, 1, 12, 1, 20, 6, 9, 1, 14]
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
TOLD = {
    "position_ids": POSITIONS,
    "position_ids of text, height and width": POSITIONS.expand(4, 1, -1),
    "positions": POSITIONS,
    "cu_seq_lens_q": torch.tensor([0, *LENGTHS]).cumsum(0),
    "cu_seq_lens_q of one row": torch.tensor([[0, *LENGTHS]]).cumsum(1),
}


@pytest.mark.parametrize("rows", ["last", "tokens"])
@pytest.mark.parametrize("told", TOLD)
def test_packed_texts_are_texts(rows, told):
    class Packed(Small):
        def forward(self, ids, position_ids=None, positions=None, cu_seq_lens_q=None):
            return super().forward(ids)

    model, ids = Packed(), ids_of(1, sum(LENGTHS), 12)
    with torch.no_grad(), observe(model, rows=rows) as one_by_one:
        for text in ids[0].split(LENGTHS):
            model(text[None])
    given = {told.split()[0]: TOLD[told]}
    with torch.no_grad(), observe(model, rows=rows) as together:
        model(ids, **given)
    with pytest.raises(ValueError, match="must be those of 72 position ids"):
        measured(model, ids.view(4, 18), **given)
    with pytest.raises(ValueError, match="cu_seqlens must be of one row of texts"):
        measured(Masked(), ids, cu_seqlens=torch.zeros(2, 3))
    keys = "n", "Q", "M"
    if rows == "tokens":
        keys = "n", "Q", "V_W_unbiased", "V_W_local", "V_W_text"
    got, want = (each.compute()["block.01"] for each in (together, one_by_one))
    assert [got[key] for key in keys] == pytest.approx([want[key] for key in keys], rel=1e-4)


class KeepsTheMask(nn.Module):
    """Gives its model, which attends to padding, no mask."""

    def __init__(self):
        super().__init__()
        self.net = llama()

    def forward(self, input_ids, attention_mask=None, again=False):
        if again:  # two passes of a module around the model, which is not told
            return [self(input_ids), self(input_ids)]
        return self.net(input_ids=input_ids)


def test_a_mask_of_a_call_around_the_model_counts_for_the_same_tokens_alone():
    model, batch = KeepsTheMask(), token_batch(4)
    mask = torch.arange(12) < torch.tensor([[12], [5], [7], [3]])
    for layers in ("blocks", lambda model: model.net):
        with torch.no_grad(), observe(model, layers) as geometry:
            model(batch["input_ids"], mask.long())
        assert {values["n"] for values in geometry.compute().values()} == {27}
    with torch.no_grad(), observe(model) as geometry:
        model(batch["input_ids"], mask.long())
        model.net(input_ids=batch["input_ids"])  # by itself, it is told nothing
        model(batch["input_ids"], mask.long(), again=True)
    assert geometry.compute()["embed"]["n"] == 27 + 48 + 2 * 27


class Embeds(Small):
    """Gives the part that is measured its embeddings, and keeps what tells padding."""

    def __init__(self):
        super().__init__()
        self.part = Small()
        self.part.word = nn.Identity()

    def forward(self, ids, attention_mask):
        return self.part(self.word(ids))


def test_a_mask_around_a_part_that_is_given_embeddings_is_not_dropped():
    ids, layers = torch.arange(12).view(3, 4), lambda model: model.part
    with pytest.raises(ValueError, match=r"must tell padding from tokens; .* attention_mask"):
        measured(Embeds(), ids, layers=layers, attention_mask=KEEP)
    every = torch.ones_like(KEEP)
    assert measured(Embeds(), ids, layers=layers, attention_mask=every)["embed"]["n"] == 12


def test_the_mask_of_an_encoder_is_not_the_decoders():
    model = t5()
    ids, mask = token_batch(4)["input_ids"], torch.ones(4, 12).long()
    mask[:, 5:] = 0
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing reaches the encoder; a cache is gone on from
        states = model.encoder(input_ids=ids, attention_mask=mask)
        with observe(model) as geometry:
            model(encoder_outputs=states, attention_mask=mask, decoder_input_ids=ids)
        with observe(model) as generating:
            model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4)
    assert geometry.compute()["decoder.block.00"]["n"] == 48
    assert generating.compute()["encoder.block.00"]["n"] == 4 * 5
