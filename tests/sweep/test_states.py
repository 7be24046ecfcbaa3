"""State dicts of training loops as checkpoints, and token ids in place of a text."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import embedgeo
from embedgeo.checkpoints.loading import load_file
from embedgeo.cli import main
from embedgeo.results.folder import SweepFolder
from tests.models import VOCABULARY, NanoGPT

MAKE = ("--model-class", "tests.models:NanoGPT")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def ids(tmp_path):
    drawn = np.random.default_rng(0).integers(VOCABULARY, size=400).astype(np.uint16)
    np.save(tmp_path / "ids.npy", drawn)
    return drawn


def arguments(folder, options):
    out = folder.parent / "out"
    tokens = folder.parent / "ids.npy"
    given = ("--tokens", str(tokens), "--seq-len", "16", "--out", str(out), *options)
    return ["sweep", "--model", str(folder), *given]


def sweep(capsys, folder, *options, status=0):
    """What the command says."""
    assert main(arguments(folder, options)) == status
    printed = capsys.readouterr()
    return printed.out + printed.err


def model(step):
    with torch.random.fork_rng():
        torch.manual_seed(step)
        return NanoGPT()


class GoesOn(NanoGPT):
    """Its run saves its latest checkpoint over meanwhile."""

    def __init__(self):
        super().__init__()
        torch.save({"model": model(3).state_dict(), "step": 3}, self.latest)


class Wrapped(nn.Module):
    """A model inside of others, whose parts have names of their own."""

    def __init__(self, inner):
        super().__init__()
        self.model = nn.ModuleDict({"_orig_mod": inner})
        self.loss = nn.Linear(2, 2)


def test_state_dicts_named_by_their_step_are_measured_on_given_tokens(tmp_path, folder, ids):
    states = [model(step).state_dict() for step in range(4)]
    optimizer = torch.optim.AdamW(model(0).parameters()).state_dict()
    torch.save(states[0], folder / "step0.pt")
    torch.save(
        {"epoch": 1, "optimizer": optimizer, "model": states[1]}, folder / "model_step10.pth"
    )
    torch.save({"state_dict": Wrapped(model(2)).state_dict()}, folder / "step=20.ckpt")
    torch.save({"model": states[3], "step": 30}, folder / "last.pt")
    torch.save(optimizer, folder / "optimizer_step10.pt")
    options = arguments(folder, (*MAKE, "--token-tables", "true"))
    assert main(options) == 0
    found = embedgeo.load_results(tmp_path / "out")
    assert sorted(found["step"].unique()) == [0, 10, 20, 30]
    inputs = torch.from_numpy(ids.astype(np.int64)).view(-1, 16)
    for seed, step in enumerate((0, 10, 20, 30)):
        with torch.no_grad(), embedgeo.observe(made := model(seed)) as geometry:
            logits = made(inputs)
        records = found[found["step"] == step].set_index(["layer", "metric"])["value"]
        for layer, values in geometry.compute().items():
            for key in ("Q", "V_W_unbiased"):
                assert records[layer, key] == pytest.approx(float(values[key]), rel=1e-6)
        loss = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), inputs[:, 1:])
        assert records["model", "loss"] == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.filterwarnings("ignore:.* other steps than in their names")
@pytest.mark.parametrize(("name", "is_copy"), [("ckpt.pt", False), ("last_step.pt", True)])
def test_a_file_that_is_saved_over_meanwhile_is_left_to_the_next_sweep(
    tmp_path, folder, ids, capsys, monkeypatch, name, is_copy
):
    first, latest = folder / "step1.pt", folder / name
    torch.save({"model": model(2).state_dict(), "step": 2}, latest)
    torch.save({"model": model(1).state_dict()}, first)
    if is_copy:
        first.write_bytes(latest.read_bytes())
    monkeypatch.setattr(GoesOn, "latest", latest, raising=False)
    goes_on = ("--model-class", f"{__name__}:GoesOn")
    said = sweep(capsys, folder, *goes_on, status=3)
    assert f"{name} was of step 2, and has been saved over with step 3. Sweep again." in said
    swept = SweepFolder(tmp_path / "out")
    assert swept.done() == {"step1.pt"}
    for _ in range(2):
        sweep(capsys, folder, *goes_on)
        assert set(embedgeo.load_results(swept.path)["step"]) == {1, 3}
        # as an earlier version has dated it
        swept.write(name, swept.read(name).assign(step=2))


def test_one_file_without_a_step_is_one_checkpoint(tmp_path, folder, ids, capsys):
    torch.save({"model": model(0).state_dict(), "monitor": {"steps": 3}}, folder / "checkpoint.pt")
    rows = ids[:96].reshape(6, 16)
    np.save(tmp_path / "ids.npy", ids[:96])
    left_out = ("--skip-first-positions", "3", "--ignore-token-ids", str(ids[5]))
    for source in (folder, folder / "checkpoint.pt"):
        (source.parent / "ids.npy").write_bytes((tmp_path / "ids.npy").read_bytes())
        sweep(capsys, source, *MAKE, *left_out)
        (metrics,) = source.parent.glob("out/metrics.csv")
        found = pd.read_csv(metrics)
        assert set(found["step"]) == {0}
        assert set(found.query("metric == 'n'")["value"]) == {(rows[:, 3:] != ids[5]).sum()}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "Give --model-class package.module.Class, or"),
        (("--model-class", "tests.models:no"), "model_class must"),
        ((*MAKE, "--tokens", "nowhere.npy"), "a file that exists"),
        ((*MAKE, "--unit", "line"), "leave out text, tokenizer"),
        ((*MAKE, "--ignore-token-ids", "special"), "and ignore_token_ids special"),
    ],
)
def test_what_does_not_fit_together_is_said(folder, ids, capsys, options, said):
    torch.save(model(0).state_dict(), folder / "step1.pt")
    assert said in sweep(capsys, folder, *options, status=2)


def test_what_cannot_be_loaded_is_said(tmp_path):
    for content, said in (
        (NanoGPT(width=8).state_dict(), "weights of the model that tests.models:NanoGPT makes; "),
        ([1.0], "step1.pt must hold the weights"),
    ):
        torch.save(content, tmp_path / "step1.pt")
        with pytest.raises(ValueError, match=said):
            load_file(tmp_path / "step1.pt", MAKE[1])


class Lenient(NanoGPT):
    """It takes what it finds."""

    def load_state_dict(self, state, strict=True, assign=False):
        return super().load_state_dict(state, strict=False, assign=assign)


def test_a_class_that_takes_less_than_its_weights_is_refused(tmp_path):
    state = Lenient().state_dict()
    del state[lost := "transformer.h.0.ln_1.bias"]
    torch.save(state, tmp_path / "step1.pt")
    with pytest.raises(ValueError, match=f"; {lost} are in one of them alone"):
        load_file(tmp_path / "step1.pt", Lenient)


def test_what_is_no_file_of_tokens_is_said(tmp_path, folder, capsys):
    torch.save(model(0).state_dict(), folder / "step1.pt")
    for wrong in (np.zeros((2, 20), int), np.ones(40), np.full(40, -1), np.zeros(0, int)):
        np.save(tmp_path / "ids.npy", wrong)
        assert "tokens must be a .npy file of token ids" in sweep(capsys, folder, *MAKE, status=2)
