"""`embedgeo.describe`, and the command ``embedgeo doctor``: what a measurement then finds and
holds.
"""

from collections import Counter

import pytest
import torch
from torch import nn

import embedgeo
from embedgeo import GeometryCallback, GeometryMonitor, StepMonitor, describe
from embedgeo.cli import main
from tests.models import FAMILIES, NanoGPT, gpt_neox, hooks, t5, token_batch
from tests.sweep.conftest import hub  # noqa: F401 (a fixture)
from tests.training.runs import assert_same_random_state, moments, random_state

SOURCES = {
    "gpt_neox": "token ids of gpt_neox.embed_in",
    "bert": "token ids of bert.embeddings.word_embeddings",
    "t5": "token ids of encoder.embed_tokens, decoder.embed_tokens",
}


@pytest.mark.parametrize("name", SOURCES)
def test_layers_and_sources(name):
    with torch.device("cpu" if name == "bert" else "meta"):
        model = FAMILIES[name].build()
    found = describe(GeometryMonitor(), model)
    assert found.token_ids == SOURCES[name]
    assert found.mask == "the model's mask where it is given one"
    assert found.warnings == ()
    assert {layer.width for layer in found.layers} == {16}


@pytest.mark.parametrize(("jackknife", "window"), [(4, 1), (0, 2)])
def test_the_bytes_are_those_that_the_states_take(jackknife, window):
    model = gpt_neox(max_position_embeddings=512)
    made = []

    def make(dim):
        made.extend(new := embedgeo.default_metrics(dim))
        return new

    monitor = GeometryMonitor(metrics=make, jackknife=jackknife, window=window)
    found = describe(monitor, model, batch_size=8, seq_len=48)
    made.clear()
    # all token types in each of four groups
    ids = torch.arange(8)[:, None] // 4 * 48 + torch.arange(48)
    with embedgeo.observe(model, metrics=make, jackknife=jackknife):
        for _ in range(window):
            model(input_ids=ids)
    held = Counter()
    for metric in made:
        if metric.dim == 16 and metric.update_called:
            states = metric.metric_state.values()
            held[type(metric).__name__] += sum(state.nbytes for state in states)
    # two copies are planned for: of all rows, and of the ordinary ones
    assert found.metrics == {name: 2 * num_bytes for name, num_bytes in held.items()}
    assert found.num_rows == 8 * 48 * window


def test_all_monitors_are_described_and_nothing_is_changed():
    model = gpt_neox(hidden_dropout=0.5)
    model.gpt_neox.layers[1].eval()
    modes = [module.training for module in model.modules()]
    state = random_state()
    options = {"metrics": moments, "every_n_steps": 7}
    by_hand = StepMonitor(model, **options)
    for monitor in (GeometryMonitor(**options), GeometryCallback(**options), by_hand):
        assert describe(monitor, model).num_rows == 8 * 512
    assert [module.training for module in model.modules()] == modes
    assert_same_random_state(state, random_state())
    assert hooks(model) == 0


class Pairs(NanoGPT):
    def forward(self, left, right):
        return super().forward(left + 0 * right)


def test_what_cannot_be_run_has_no_token_ids_or_is_not_reached_is_a_warning():
    monitor = GeometryMonitor(metrics=moments)
    (warning,) = describe(monitor, Pairs()).warnings
    assert "missing 1 required positional argument: 'right'" in warning
    ids = torch.zeros(3, 5, dtype=torch.long)
    found = describe(monitor, Pairs(), {"left": ids, "right": ids})
    (warning,) = found.warnings
    assert warning.startswith("A measurement has too few rows for V_W / V (4,096), M / Q (2,048)")
    assert "anisotropy" not in warning  # which this monitor does not measure
    assert found.num_rows == 15
    block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    found = describe(monitor, encoder, torch.zeros(2, 8, 16))
    assert found.token_ids == "no token ids"
    assert "No token ids were found" in found.warnings[0]
    model = NanoGPT()
    model.unused = nn.Linear(16, 16)
    (warning,) = describe(GeometryMonitor(layers=["blocks", "unused"]), model).warnings
    assert "No forward pass reached unused" in warning
    assert describe(monitor, gpt_neox(), token_batch(3)).num_rows == 36


def test_the_command_prints_the_description(capsys, tmp_path):
    arguments = ["--batch-size", "2", "--seq-len", "16", "--layers", "*.block.?"]
    monitor = GeometryMonitor(layers="*.block.?")
    model = t5()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    assert main(["doctor", str(tmp_path), *arguments]) == 0
    expected = str(describe(monitor, model, batch_size=2, seq_len=16))
    assert capsys.readouterr().out.splitlines() == expected.splitlines()
    gpt_neox().config.save_pretrained(tmp_path / "gpt")
    assert main(["doctor", str(tmp_path / "gpt"), "--ranks", "2"]) == 0
    printed = capsys.readouterr().out
    assert "rows       512 a measurement" in printed
    for given, said in (
        (["./nowhere"], "must be a local path that exists or a repository on the Hub"),
        ([str(tmp_path), "--seq-len", "-1"], "seq_len and ranks must be positive"),
    ):
        assert main(["doctor", *given]) == 2
        assert said in capsys.readouterr().err


def test_a_repository_is_described_without_its_weights(hub, tmp_path, printed):  # noqa: F811
    gpt_neox().config.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_bytes()
    hub.add("lab/tiny", "main", {"config.json": config, "model.safetensors": b"never read"})
    assert main(["doctor", "lab/tiny", "--jackknife", "2"]) == 0
    assert "token ids of gpt_neox.embed_in" in printed()
    assert not hub.downloads(".safetensors")
