"""A description of a model is what a measurement then finds and holds."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

import embedgeo
from embedgeo import GeometryCallback, GeometryMonitor, StepMonitor
from tests.models import FAMILIES, NanoGPT, gpt_neox, hooks, token_batch
from tests.training.runs import assert_same_random_state, moments, random_state

SOURCES = {
    "gpt_neox": ("gpt_neox.embed_in", "attention_mask of GPTNeoXForCausalLM"),
    "gpt2": ("transformer.wte", "attention_mask of GPT2LMHeadModel"),
    "llama": ("model.embed_tokens", "attention_mask of LlamaForCausalLM"),
    "bert": ("bert.embeddings.word_embeddings", "attention_mask of BertForMaskedLM"),
    "t5": (
        "encoder.embed_tokens and decoder.embed_tokens",
        "attention_mask of encoder and attention_mask of decoder",
    ),
}


class WithoutBlocks(nn.Module):
    """Layers that are no list of blocks."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.first, self.second = (
            nn.Linear(16, 16),
            nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)),
        )

    def forward(self, ids):
        return self.head(self.second(self.first(self.table(ids))))


def only_moments(dim):
    return moments(dim)


def describe(model, batch=None, *, batch_size=2, seq_len=16, **options):
    """A monitor's description of a model, of few rows."""
    monitor = GeometryMonitor(**options)
    return embedgeo.describe(monitor, model, batch, batch_size=batch_size, seq_len=seq_len)


def test_the_opening_line_says_which_main_numbers_will_be_absent_without_token_ids(caplog):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    said = (
        "StepMonitor: V_W / V, dimension between tokens and other values over token types will be "
        "absent, because TransformerEncoder has no embedding table that is called with token ids. "
        "Give token_ids=, a function of the batch."
    )
    cases = (
        (encoder, {}, 1),
        (encoder, {"token_ids": lambda batch: torch.zeros(2, 3, dtype=torch.int64)}, 0),
        (NanoGPT(), {}, 0),
    )
    for model, options, count in cases:
        caplog.clear()
        with caplog.at_level("INFO", "lightning.pytorch"):
            monitor = StepMonitor(model, 1, measure_last=False, on_error="raise", **options)
            with monitor.step(0):
                model(torch.randn(2, 3, 16) if model is encoder else token_batch(2)["input_ids"])
            monitor.close()
        assert caplog.text.splitlines().count(said) == count
        found = {record["metric"] for record in monitor.history}
        assert ("V_W_over_V_unbiased" in found) == (not count)


IDS = torch.arange(24).view(2, 12)
MANY_IDS = torch.arange(50).repeat(24).view(100, 12)
ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
OF_ALL = "dimension between tokens (1,000 rows), intrinsic dimension (1,000 rows)"
FEW = f" That is too few for {OF_ALL}, anisotropy (160 rows)."
BY_HAND = {
    "token_ids": lambda batch: torch.zeros(batch.shape[:2], dtype=torch.int64),
    "mask": lambda batch: torch.ones(batch.shape[:2]),
}


class Endless(torch.utils.data.IterableDataset):
    """Sequences whose number nothing tells."""

    def __iter__(self):
        return iter(IDS)


@pytest.mark.parametrize(
    ("model", "batch", "options", "said", "n"),
    [
        (NanoGPT(), IDS, {}, ("24", 1, "token ids of transformer.wte, no mask." + FEW), 24),
        (NanoGPT(), [IDS], {}, ("24", 1, "token ids of transformer.wte, no mask." + FEW), 24),
        (NanoGPT(), MANY_IDS, {}, ("1,200", 1, "token ids of transformer.wte, no mask."), 1200),
        (
            NanoGPT(width=128),
            MANY_IDS,
            {},
            (
                "1,200",
                1,
                "token ids of transformer.wte, no mask. That is too few for anisotropy (1,280 "
                "rows).",
            ),
            1200,
        ),
        (NanoGPT(), IDS, BY_HAND, ("24", 1, "token ids of token_ids=, mask of mask=." + FEW), 24),
        (
            NanoGPT(),
            None,
            {"probe": [MANY_IDS[:20], MANY_IDS[20:40]]},
            (
                "480",
                2,
                f"token ids of transformer.wte, no mask. That is too few for {OF_ALL}.",
            ),
            480,
        ),
        (
            NanoGPT(),
            IDS,
            {"probe": torch.utils.data.DataLoader(Endless(), 2)},
            "token ids of transformer.wte, no mask.",
            24,
        ),
        (NanoGPT(), None, {}, "token ids of transformer.wte, no mask.", 24),
        (
            gpt_neox(),
            {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)},
            {"metrics": only_moments},
            ("24", 1, "token ids of gpt_neox.embed_in, the model's mask where it is given one."),
            24,
        ),
        (
            NanoGPT(),
            IDS,
            {"rows": "mean", "mask": lambda ids: ids < 23},
            (
                "2",
                1,
                "no token ids, mask of mask=. That is too few for intrinsic dimension (1,000 "
                "rows), anisotropy (160 rows).",
            ),
            2,
        ),
        (
            ENCODER,
            {"src": torch.randn(2, 12, 16), "labels": IDS},
            {"metrics": only_moments},
            "no token ids, the model's mask where it is given one.",
            24,
        ),
    ],
)
def test_the_opening_says_how_many_rows_of_which_tokens_and_what_they_are_too_few_for(
    model, batch, options, said, n, caplog
):
    caplog.set_level("INFO", "lightning.pytorch")
    options = {"measure_last": False, "on_error": "raise", **options}
    with StepMonitor(model, 1, **options) as monitor, monitor.step(0, batch):
        if model is ENCODER:
            model(batch["src"])
        elif isinstance(batch, dict):
            model(**batch)
        else:
            model(batch[0] if isinstance(batch, list) else IDS if batch is None else batch)
    if isinstance(said, tuple):
        num_rows, num_batches, sources = said
        said = (
            f"up to {num_rows} rows a measurement (batches like the first, each run once: "
            f"{num_batches}), {sources}"
        )
    assert caplog.text.splitlines()[1] == f"StepMonitor: {said}"
    counted = {record["value"] for record in monitor.history if record["metric"] == "n"}
    assert counted == {n}


@pytest.mark.parametrize("name", SOURCES)
def test_where_token_ids_and_mask_come_from(name):
    with torch.device("meta" if name == "gpt2" else "cpu"):
        model = FAMILIES[name].build()
    found = describe(model)
    assert (found.token_ids, found.mask) == SOURCES[name]
    assert found.warnings == ()
    assert {layer.width for layer in found.layers} == {16}
    paths = dict(model.named_modules())
    assert all(layer.path.removeprefix("input of ") in paths for layer in found.layers)


def test_an_encoder_that_is_given_embeddings_has_no_token_ids_and_says_so():
    block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    (warning,) = describe(encoder).warnings
    assert "Give a batch: embedgeo.describe(monitor, model, batch)" in warning
    found = describe(encoder, torch.zeros(2, 8, 16))
    assert found.token_ids == "none"
    (warning,) = found.warnings
    assert "No token ids were found" in warning
    assert "token_ids=" in warning


def test_a_model_without_blocks_is_told_which_layers_to_give_and_these_are_measured():
    model = WithoutBlocks()
    found = describe(model)
    assert found.layers == ()
    (warning,) = found.warnings
    assert "needs a list of transformer blocks; found none in WithoutBlocks" in warning
    assert "such as table, head, first, second" in warning
    layers = ["table", "first", "second"]
    assert [layer.width for layer in describe(model, layers=layers).layers] == [16, 16, 16]
    with embedgeo.observe(model, layers=layers) as geometry:
        model(token_batch()["input_ids"] % 50)
    assert [*geometry.compute()] == layers


ALL_BUT_NEXT_TOKENS = partial(embedgeo.full_metrics, extra=("scales", "coordinates", "similarity"))


@pytest.mark.parametrize(
    ("metrics", "jackknife", "window"),
    [(embedgeo.default_metrics, 4, 1), (ALL_BUT_NEXT_TOKENS, 0, 2)],
)
def test_the_bytes_are_those_that_the_states_take(metrics, jackknife, window):
    model = gpt_neox(max_position_embeddings=512)
    options = {"metrics": metrics, "jackknife": jackknife, "window": window}
    found = describe(model, batch_size=8, seq_len=48, **options)
    made = []

    def make(dim):
        new = metrics(dim)
        made.extend(new)
        return new

    # all token types in each of four groups
    ids = torch.arange(8)[:, None] // 4 * 48 + torch.arange(48)
    with embedgeo.observe(model, metrics=make, jackknife=jackknife):
        for _ in range(window):
            model(input_ids=ids)
    held = Counter()
    for metric in made:
        if metric.dim == 16 and metric.update_called:
            held[type(metric).__name__] += sum(
                state.nbytes for state in metric.metric_state.values()
            )
    assert found.metrics == held
    assert found.state_bytes == held.total()
    assert found.num_rows == 8 * 48 * window


def test_all_monitors_describe_and_nothing_is_changed():
    model = gpt_neox(hidden_dropout=0.5)
    model.gpt_neox.layers[1].eval()
    modes = [module.training for module in model.modules()]
    state = random_state()
    options = {"metrics": only_moments, "every_n_steps": 7}
    by_hand = StepMonitor(model, **options)
    for monitor in (GeometryMonitor(**options), GeometryCallback(**options), by_hand):
        assert embedgeo.describe(monitor, model).state_bytes == 5 * 64_248
    assert [module.training for module in model.modules()] == modes
    assert_same_random_state(state, random_state())
    assert hooks(model) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_batch_of_ones_own_a_compiled_model_and_one_that_cannot_be_run():
    class Pairs(NanoGPT):
        def forward(self, left, right):
            return super().forward(left + 0 * right)

    monitor = GeometryMonitor(metrics=only_moments)
    (warning,) = embedgeo.describe(monitor, Pairs()).warnings
    assert "could not be run on synthetic token ids" in warning
    assert "missing 1 required positional argument: 'right'" in warning
    assert "embedgeo.describe(monitor, model, batch)" in warning
    ids = torch.zeros(3, 5, dtype=torch.long)
    (warning,) = embedgeo.describe(monitor, Pairs(), {"left": ids}).warnings
    assert "could not be run on this batch" in warning
    found = embedgeo.describe(monitor, Pairs(), {"left": ids, "right": ids})
    assert (found.warnings, found.num_rows) == ((), 15)
    compiled = torch.compile(NanoGPT(), backend="eager")
    (warning,) = embedgeo.describe(monitor, compiled).warnings
    assert warning.startswith("The model is compiled: a measured step runs eagerly")


def test_the_text_is_readable_at_100_columns():
    found = embedgeo.describe(GeometryMonitor(layers=["blocks", "mean(last3)"]), gpt_neox())
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 100
    assert (
        "block.00 … block.02  16     gpt_neox.layers.0 … gpt_neox.layers.2 (GPTNeoXLayer)" in lines
    )
    assert "rows       4,096 a measurement" in lines
    assert lines[-1] == "No warnings."


def test_the_rows_of_a_probe_are_those_of_its_batches():
    ids = torch.zeros(12, 7, dtype=torch.long)
    batches = [{"ids": ids[:6]}, {"ids": ids[6:]}]
    found = describe(gpt_neox(), batch_size=2, seq_len=64, metrics=only_moments, probe=batches)
    assert found.num_rows == 2 * 6 * 7
    loader = torch.utils.data.DataLoader(ids, batch_size=4)
    found = describe(gpt_neox(), batch_size=2, seq_len=64, metrics=only_moments, probe=loader)
    assert found.num_rows == 3 * 4 * 64


def test_sequences_have_one_row_each():
    found = describe(gpt_neox(), batch_size=6, rows="mean")
    assert found.num_rows == 6
    with pytest.raises(ValueError, match="must be positive; got 0, 512 and 1"):
        embedgeo.describe(GeometryMonitor(), gpt_neox(), batch_size=0)


@pytest.mark.parametrize("name", ["gpt_neox", "albert", "opt", "t5"])
def test_hidden_states_are_compared_with_the_models_own(name):
    family = FAMILIES[name]
    expected = f"compared with output_hidden_states: equal at {4 * len(family.final_norm)} layers"
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = family.build()
        assert embedgeo.describe(GeometryMonitor(), model).compared == expected
    assert embedgeo.describe(GeometryMonitor(), NanoGPT()).compared == ""


def test_hidden_states_that_are_not_the_models_own_are_named():
    def copy_last(module, args, output):
        if output.hidden_states is not None:
            *first, third, last = output.hidden_states
            output["hidden_states"] = (*first, third + 0, last + 0)

    model = gpt_neox()
    model.register_forward_hook(copy_last)
    compared = embedgeo.describe(GeometryMonitor(), model).compared
    assert compared.endswith("equal at 2 layers; other than the model's: hidden.02, hidden.03")
