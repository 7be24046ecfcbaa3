"""Lightning's files as checkpoints, and the classes that they are loaded with."""

import lightning.pytorch as pl
import pandas as pd
import pytest
import torch
from torch import nn

import embedgeo
from embedgeo.checkpoints.sources import list_checkpoints
from tests.models import linear_block
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import tokenizer_files, write_files


class Blocks(pl.LightningModule):
    """A language model with as many positions as its table has."""

    def __init__(self, num_positions=64):
        super().__init__()
        self.save_hyperparameters()
        self.embedding, self.positions = nn.Embedding(300, 8), nn.Embedding(num_positions, 8)
        self.blocks = nn.ModuleList(linear_block(8) for _ in range(2))
        self.head = nn.Linear(8, 300)

    def run(self, token_ids):
        hidden = self.embedding(token_ids) + self.positions(torch.arange(token_ids.shape[1]))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


class Forward(Blocks):
    def forward(self, token_ids):
        return self.run(token_ids)


def save(path, model, step):
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.strategy.connect(model)
    loop = trainer.fit_loop.epoch_loop
    loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
    path.parent.mkdir(exist_ok=True)
    trainer.save_checkpoint(path)


@pytest.fixture
def asked(options, tmp_path):
    folder = write_files(tmp_path / "tok", tokenizer_files())
    return {**options, "tokenizer": folder / "tokenizer.json"}


def class_of(model):
    return f"{__name__}.{type(model).__name__}"


@pytest.mark.slow
def test_a_broken_last_file_fails_alone(tmp_path, asked, printed):
    model = Forward()
    for step in (1, 2):
        save(tmp_path / "run" / f"step={step}.ckpt", model, step)
    (tmp_path / "run" / "last.ckpt").write_bytes(b"half of a file")
    assert sweep(tmp_path / "run", **asked, model_class=class_of(model)) == 3
    out = printed()
    assert "failed: last.ckpt: ValueError: last.ckpt cannot be read: it is damaged" in out
    assert "run the same command again" not in out
    assert set(pd.read_csv(asked["out"] / "metrics.csv")["step"]) == {1, 2}
    printed()
    assert sweep(tmp_path / "run", **{**asked, "out": f"{asked['out']}3"}, dry_run=True) == 0
    assert printed().splitlines()[0].split()[:2] == ["?", "last.ckpt"]


def test_a_loggers_folder_is_looked_into(tmp_path):
    version = tmp_path / "lightning_logs" / "version_0"
    names = ["epoch=0-step=1.ckpt", "epoch=0-step=2.ckpt"]
    write_files(version / "checkpoints", dict.fromkeys(names, b""))
    write_files(version, {"hparams.yaml": b"{}", "eval_step_5.json": b"{}"})
    assert [each.step for each in list_checkpoints(str(version))] == [1, 2]
    (version / "last.ckpt").touch()
    with pytest.raises(ValueError, match=r"in one folder; .* this folder last\.ckpt\. Give "):
        list_checkpoints(str(version))


class Loose(Forward):
    strict_loading = False

    def __init__(self, num_positions=64, depth=2):
        super().__init__(num_positions)


class PassesOn(Loose):
    def __init__(self, **given):
        super().__init__(**given)


@pytest.mark.parametrize(
    ("kind", "saved", "defaults"),
    [(Loose, {}, "num_positions=64, depth=2"), (PassesOn, {"depth": 2}, "num_positions=64")],
)
def test_what_a_loose_module_does_not_find_in_its_file_is_said(tmp_path, kind, saved, defaults):
    weights = Forward().state_dict()
    weights["old"] = weights.pop("head.bias")
    file = {"state_dict": weights, "pytorch-lightning_version": "2.6"}
    torch.save(file | ({"hyper_parameters": saved} if saved else {}), tmp_path / "a.ckpt")
    (checkpoint,) = embedgeo.iter_checkpoints(str(tmp_path / "a.ckpt"), model_class=kind)
    with (
        pytest.warns(UserWarning, match="Found keys that are .*(head.bias|old)"),
        pytest.warns(UserWarning, match=f"{kind.__name__} is made by its defaults, {defaults}: "),
    ):
        checkpoint.load()


STATE = Forward().state_dict()


@pytest.mark.filterwarnings("ignore:Found keys|Loose is made")
@pytest.mark.parametrize(
    ("stored", "why"),
    [
        (
            {"callbacks": {"EMA": {"w": dict(Forward().named_parameters())}}},
            ": .*callbacks EMA w",
        ),
        ({"state_dict": {f"net.{k}": v for k, v in STATE.items()}}, "must hold the weights of the"),
        ({"hyper_parameters": {"num_positions": 64, "heads": 8}}, "; heads=8 cannot .* to Loose"),
        ({"hyper_parameters": {"_class_path": f"{__name__}.Forward"}}, "Give .*ing.Forward"),
    ],
)
def test_a_file_holds_the_weights_of_one_model_of_this_class_as_they_are(tmp_path, stored, why):
    file = {"state_dict": STATE, "pytorch-lightning_version": "2.6", **stored}
    torch.save(file, tmp_path / "a.ckpt")
    (checkpoint,) = embedgeo.iter_checkpoints(str(tmp_path / "a.ckpt"), model_class=Loose)
    with pytest.raises(ValueError, match=why):
        checkpoint.load()


class PositionsFirst(Forward):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 8)])


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (PositionsFirst(), r"Attention takes \(positions, sequences\), batch_first=False: "),
        (Blocks(), r"must be one that can be run .*Module \[Blocks\] is missing .*forward"),
        (
            Forward(num_positions=13),
            "must be one that can be run on sequences of seq_len tokens, .* got 16 ",
        ),
    ],
)
def test_a_model_that_cannot_be_run_is_refused_with_the_way_out(tmp_path, asked, model, why):
    save(tmp_path / "run" / "step=1.ckpt", model, 1)
    with pytest.raises(ValueError, match=why):
        sweep(tmp_path / "run", **asked, model_class=class_of(model))
    assert not asked["out"].exists()


def test_other_files_are_refused_with_what_to_save(tmp_path, asked, printed):
    model = Forward()
    torch.save(model.state_dict(), tmp_path / "step=2.ckpt")
    assert sweep(tmp_path / "step=2.ckpt", **asked, model_class=class_of(model)) == 3
    assert "what Lightning saves, with a state_dict; step=2.ckpt has none. Save it by" in printed()
    (tmp_path / "model.txt").write_text("no weights")
    with pytest.raises(
        FileNotFoundError,
        match=r"a folder with config\.json, a \.ckpt, \.pt or \.pth file, or .*model\.txt is none",
    ):
        sweep(tmp_path / "model.txt", **{**asked, "out": tmp_path / "new"})
