"""Ablation of hidden states, against float64 computations by hand and what must not matter."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import embedgeo
from embedgeo.studies.ablation import replacements
from tests import models

DIM = 6
VOCABULARY = 11


class Tiny(nn.Module):
    """An embedding, blocks that change nothing, and a head: what enters the head is the
    embedding.
    """

    def __init__(self, dropout=0.0, vocabulary=VOCABULARY):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, DIM)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Identity(), nn.Dropout(dropout)) for _ in range(2)
        )
        self.head = nn.Linear(DIM, vocabulary, bias=False)

    def forward(self, token_ids):
        hidden = self.embed(token_ids) + 0.3 * torch.roll(self.embed(token_ids), 1, 1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


@pytest.fixture
def tiny():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Tiny().double()


def tokens(rows=6, length=9, high=VOCABULARY, seed=0):
    return torch.randint(high, (rows, length), generator=torch.Generator().manual_seed(seed))


def values(model, batches, layers="layers.1", **options):
    records = embedgeo.ablation(model, batches, layers, verbose=False, **options)
    return {(each["layer"], each["metric"]): (each["value"], each["stderr"]) for each in records}


def by_hand(rows, ids, other, other_ids, name):
    """The rows of one half, replaced by what follows from the other half, row by row."""
    mean = other.mean(0)
    covariance = (other - mean).T @ (other - mean) / len(other)
    k = int(name.split("_")[1]) if name.split("_")[1].isdigit() else 0
    if name == "without_offset":
        return rows - mean
    if name.endswith("directions"):
        axes = torch.linalg.svd(other - mean, full_matrices=False).Vh[:k]
        return torch.stack(
            [row - sum((axis @ (row - mean)) * axis for axis in axes) for row in rows]
        )
    if name.endswith("coordinates"):
        largest = sorted(range(DIM), key=lambda i: -float(covariance[i, i]))[:k]
        changed = rows.clone()
        for i in largest:
            changed[:, i] = mean[i]
        return changed
    changed = rows.clone()
    for i, token in enumerate(ids.tolist()):
        if token in other_ids.tolist():
            type_mean = other[other_ids == token].mean(0)
            changed[i] = type_mean if name == "without_context" else rows[i] - type_mean
    return changed


@pytest.mark.parametrize("after_first", [False, True])
@pytest.mark.parametrize("name", [name for name in replacements() if name != "as_noise"])
def test_changes_are_those_of_a_computation_by_hand(tiny, name, after_first):
    ids = tokens()
    with torch.no_grad():
        hidden = tiny.embed(ids) + 0.3 * torch.roll(tiny.embed(ids), 1, 1)
        start = int(after_first)
        changes = []
        for half in (0, 1):
            own, other = ids[half::2], ids[1 - half :: 2]
            h, o = hidden[half::2].clone(), hidden[1 - half :: 2, start:].flatten(0, 1)
            before = F.cross_entropy(tiny.head(h[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
            changed = by_hand(
                h[:, start:].flatten(0, 1),
                own[:, start:].flatten(),
                o,
                other[:, start:].flatten(),
                name,
            )
            h[:, start:] = changed.view(len(own), -1, DIM)
            changes.append(
                F.cross_entropy(tiny.head(h[:, :-1]).flatten(0, 1), own[:, 1:].flatten()) - before
            )
    key = f"loss_change_{name}{'_after_first' if after_first else ''}"
    value, error = values(tiny, [ids])["layers.01", key]
    assert value == pytest.approx(float(sum(changes) / 2), abs=1e-9)
    assert error > 0


def test_without_a_direction_that_the_head_needs_the_loss_rises_to_chance():
    axis = F.normalize(torch.arange(1.0, DIM + 1, dtype=torch.float64), dim=0)
    model = Tiny(vocabulary=2).double()
    with torch.no_grad():
        model.embed.weight.copy_(torch.stack((axis, -axis)))
        model.head.weight.copy_(torch.stack((-2 * axis, 2 * axis)))
    turns = (torch.arange(10) + torch.arange(4)[:, None]) % 2
    value, error = values(model, [turns])["layers.01", "loss_change_without_1_directions"]
    assert value == pytest.approx(math.log(2) - math.log1p(math.exp(-4 * 0.7)), abs=1e-12)
    assert error == pytest.approx(0, abs=1e-12)


def test_batches_do_not_matter_nor_does_the_mode(tiny):
    ids = tokens()
    whole = values(tiny, [ids])
    parts = values(tiny.train(), [ids[:1], {"input_ids": ids[1:]}])
    assert tiny.training
    for key, value in whole.items():
        assert value == pytest.approx(parts[key], abs=1e-12, nan_ok=True)
    dropping = Tiny(dropout=0.5).double().train()
    dropping.load_state_dict(tiny.state_dict())
    assert values(dropping, [ids]) == values(tiny, [ids])


@pytest.mark.parametrize("build", [models.gpt2, models.llama])
def test_padding_on_either_side_and_tied_heads_do_not_matter(build):
    model = build(tie_word_embeddings=True).double()
    ids = tokens(4, 8, models.VOCABULARY)
    plain = values(model, [ids], "block.1")
    pad = torch.full((4, 3), models.PAD)
    ones, zeros = torch.ones_like(ids), torch.zeros_like(pad)
    for sides in ((0, 1), (1, 0)):
        padded = torch.cat([(ids, pad)[i] for i in sides], 1)
        mask = torch.cat([(ones, zeros)[i] for i in sides], 1)
        found = values(model, [{"input_ids": padded, "attention_mask": mask}], "block.1")
        for key, value in plain.items():
            assert found[key] == pytest.approx(value, abs=1e-9, nan_ok=True), (key, sides)


def test_masked_models_have_fixed_masks_or_labels():
    model = models.albert().double()
    ids = tokens(8, 20, models.VOCABULARY)
    whole = values(model, [ids], "block.0", mask_token_id=3)
    for key, value in values(model, [ids[:3], ids[3:]], "block.0", mask_token_id=3).items():
        assert whole[key] == pytest.approx(value, abs=1e-7, nan_ok=True), key
    labels = ids.masked_fill(torch.arange(20) % 5 != 0, -100)
    with torch.no_grad():
        loss = F.cross_entropy(model.eval()(input_ids=ids).logits.transpose(1, 2), labels)
    given = values(model, [{"input_ids": ids, "labels": labels}], "block.0")
    assert given["model", "loss"][0] == pytest.approx(float(loss), abs=1e-9)
    with pytest.raises(ValueError, match="mask_token_id"):
        values(model, [ids], "block.0")


def test_what_cannot_be_had_is_refused(tiny):
    with pytest.raises(ValueError, match="is both"):
        values(models.t5(), [tokens()], "blocks")
    with pytest.raises(ValueError, match="is a mean"):
        values(models.gpt2(), [tokens()], "mean(last2)")
    tiny.unused = nn.Identity()
    with pytest.raises(ValueError, match="unused never was"):
        values(tiny, [tokens()], "unused")
    with pytest.raises(ValueError, match="two halves; got 1"):
        values(tiny, [tokens(1)])
    with pytest.raises(ValueError, match="language model head"):
        values(models.gpt2().transformer, [tokens(2)[:, :1]], "blocks")


MASKED = ["bert", "roberta", "modernbert", "albert"]


def test_every_family_has_all_changes_and_an_identity_of_zero():
    for name in (*models.DECODERS, *MASKED):
        options = {"mask_token_id": 3} if name in MASKED else {}
        found = values(
            models.eval_model(name), [tokens(6, 12, models.VOCABULARY)], "block.1", **options
        )
        changes = {key: value for (layer, key), (value, _) in found.items() if layer != "model"}
        assert len(changes) == 2 * len(replacements()) + 1, name
        assert changes["loss_change_identity"] == 0, name
        assert all(math.isfinite(value) for value in changes.values()), name
        assert any(changes.values()), name


class Answering(Tiny):
    """Gives its logits together with others, as the function says."""

    def __init__(self, answer, vocabulary=VOCABULARY):
        super().__init__(vocabulary=vocabulary)
        self.answer = answer

    def forward(self, token_ids):
        hidden = []
        hook = self.layers[1].register_forward_hook(lambda *call: hidden.append(call[2]))
        logits = super().forward(token_ids)
        hook.remove()
        return self.answer(hidden[0], logits, logits.mean())


@pytest.mark.parametrize("vocabulary", [5, VOCABULARY])
@pytest.mark.parametrize(
    "answer",
    [
        lambda hidden, logits, loss: (hidden, logits),
        lambda hidden, logits, loss: (logits, hidden),
        lambda hidden, logits, loss: (loss, logits),
        lambda hidden, logits, loss: (logits, None),
        lambda hidden, logits, loss: {"loss": loss, "logits": logits},
        lambda hidden, logits, loss: {"hidden": hidden, "scores": logits},
        lambda hidden, logits, loss: SimpleNamespace(hidden=hidden, logits=logits),
    ],
)
def test_logits_are_found_in_what_a_model_returns(answer, vocabulary):
    model = Answering(answer, vocabulary).double()
    plain = Tiny(vocabulary=vocabulary).double()
    plain.load_state_dict(model.state_dict())
    ids = tokens(high=vocabulary)
    assert values(model, [ids]) == values(plain, [ids])


def test_what_might_be_logits_or_has_too_few_of_them_is_refused():
    both = Answering(lambda hidden, logits, loss: (hidden, logits), DIM).double()
    with pytest.raises(ValueError, match=r"gives \(6, 9, 6\), \(6, 9, 6\)\. .* name one, as in"):
        values(both, [tokens(high=DIM)])
    named = Answering(lambda hidden, logits, loss: {"logits": logits[..., :3]}).double()
    with pytest.raises(ValueError, match=r"up to 10; Answering gives \(6, 9, 3\)"):
        values(named, [tokens()])
    wordless = Answering(lambda hidden, logits, loss: loss).double()
    with pytest.raises(ValueError, match=r"Answering gives \(\)\."):
        values(wordless, [tokens()])


def test_rows_of_unseen_types_keep_what_they_are(tiny):
    ids = torch.tensor([[1, 2, 3], [1, 2, 4], [1, 2, 3], [1, 2, 4]])
    assert values(tiny, [ids])["model", "unseen_type_share"][0] == pytest.approx(1 / 3)


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "gemma2"])
def test_the_lens_is_the_loss_of_final_norm_and_head_on_each_layer_and_of_the_model_on_the_last(
    family,
):
    model = models.FAMILIES[family].build().double().eval()
    norm = model.get_submodule(models.FAMILIES[family].final_norm[""])
    ids = tokens(5, 9, models.VOCABULARY)
    found = embedgeo.logit_lens(model, [ids[:2], ids[2:]])
    assert [each["layer"] for each in found] == ["embed", "block.00", "block.01", "block.02"]
    assert {each["metric"] for each in found} == {"logit_lens_loss"}
    with torch.no_grad():
        output = model(input_ids=ids, labels=ids, output_hidden_states=True)
        for each, state in zip(found[:-1], output.hidden_states, strict=False):
            logits = model.get_output_embeddings()(norm(state))
            if family == "gemma2":
                logits = 30 * torch.tanh(logits / 30)
            losses = F.cross_entropy(
                logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
            ).mean(1)
            assert each["value"] == pytest.approx(float(losses.mean()), abs=1e-6)
            assert each["stderr"] == pytest.approx(float(losses.std() / len(ids) ** 0.5), rel=1e-5)
    assert found[-1]["value"] == pytest.approx(float(output.loss), abs=1e-6)
    assert len({round(each["value"], 6) for each in found}) == 4
    (alone,) = embedgeo.logit_lens(model, [ids], ["final_norm", "block.0[1]"])
    assert alone["value"] == pytest.approx(found[2]["value"], abs=1e-9)
    assert (alone["layer"], alone["layer_index"]) == ("block.01", 1)


def test_the_lens_of_a_masked_model_is_at_its_masked_tokens_and_blocks_may_share_weights():
    model = models.albert().double()
    ids = tokens(8, 20, models.VOCABULARY)
    found = embedgeo.logit_lens(model, [ids], mask_token_id=3)
    loss = values(model, [ids], "block.0", mask_token_id=3)["model", "loss"][0]
    assert found[-1]["value"] == pytest.approx(loss, abs=1e-9)
    assert len({each["value"] for each in found}) == len(found) >= 3


def test_where_there_is_no_lens_one_sentence_says_why():
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is both"):
        embedgeo.logit_lens(models.t5(), [tokens()])
    with pytest.raises(
        ValueError,
        match=r"the logit lens reads what enters the first block .*; got final_norm. Add",
    ):
        embedgeo.logit_lens(models.gpt2(), [tokens()], "final_norm")
    headless = models.gpt2().transformer
    with pytest.raises(ValueError, match=r"GPT2Model gives .* Take one with a language model head"):
        embedgeo.logit_lens(headless, [tokens()])
    assert math.isnan(embedgeo.logit_lens(models.gpt2(), [tokens(1)])[0]["stderr"])
