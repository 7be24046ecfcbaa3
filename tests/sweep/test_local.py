"""Local folders: the monitor's numbers again, Lightning's files, several layouts."""

from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader

import embedgeo
from embedgeo.checkpoints.sources import list_checkpoints
from embedgeo.results.folder import SweepFolder
from embedgeo.results.records import loss_outliers
from embedgeo.sweep import check
from embedgeo.text import cut_sequences
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import (
    TEXT,
    checkpoint_files,
    local_run,
    model,
    tokenize_sequences,
    tokenizer_files,
    tokenizer_of,
    write_files,
)


class Pretraining(pl.LightningModule):
    """As the demo trains: a Hugging Face model inside, checkpoints as folders."""

    def __init__(self):
        super().__init__()
        from copy import deepcopy

        self.model = deepcopy(model(0)).train()

    def training_step(self, batch, batch_idx):
        return self.model(**batch, labels=batch["input_ids"]).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class SaveFolders(pl.Callback):
    def __init__(self, folder, tokenizer):
        self.folder, self.tokenizer = folder, tokenizer

    def save(self, trainer, module):
        path = self.folder / f"step{trainer.global_step}"
        module.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.save(trainer, module)

    def on_train_end(self, trainer, module):
        self.save(trainer, module)


@pytest.mark.slow
def test_a_sweep_over_a_training_run_gives_the_monitors_numbers(tmp_path):
    tokenizer = tokenizer_of(tokenizer_files())
    text = "\n".join(TEXT * 12)
    (tmp_path / "probe.txt").write_text(text)
    ids = cut_sequences([tokenizer.encode(text)], 32)
    assert len(ids) % 9  # the last batch is smaller
    loader = DataLoader([{"input_ids": row} for row in ids], batch_size=9)
    monitor = embedgeo.GeometryMonitor(every_n_steps=1, probe=loader, jackknife=5, on_error="raise")
    trainer = pl.Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[SaveFolders(tmp_path / "checkpoints", tokenizer), monitor],
    )
    trainer.fit(Pretraining(), loader)
    asked = {"text": str(tmp_path / "probe.txt"), "seq_len": 32, "num_tokens": ids.numel()}
    asked |= {"batch_size": 9, "jackknife": 5, "out": str(tmp_path / "out")}
    assert sweep(str(tmp_path / "checkpoints"), **asked) == 0
    keys = ["step", "layer", "metric"]
    table = pd.read_csv(tmp_path / "out" / "metrics.csv").query("layer != 'model'")
    history = pd.DataFrame(monitor.history).query("layer_index >= 0")
    offline, online = (each.set_index(keys).sort_index() for each in (table, history))
    assert offline.index.equals(online.index)
    assert {step for step, _, _ in online.index} == {0, 1, 2}
    for column in ("value", "stderr"):
        np.testing.assert_allclose(offline[column], online[column], rtol=1e-6, atol=1e-12)
    assert (online.xs(("block.01", "V"), level=["layer", "metric"])["stderr"] > 0).all()


def test_layouts_of_folders(tmp_path):
    for i, name in enumerate(("step{}", "checkpoint-{}", "global_step{}", "ckpt_{:03d}")):
        run = local_run(tmp_path / str(i), steps=(10, 2), name=name)
        # a final model beside them, as transformers' Trainer leaves it
        write_files(run, checkpoint_files(3))
        (run / "logs").mkdir()
        assert [c.step for c in list_checkpoints(str(run))] == [2, 10]
        assert [c.step for c in list_checkpoints(str(run / name.format(10)))] == [10]


@pytest.mark.slow
def test_a_sweep_goes_on_where_its_paths_are_written_otherwise(hub, tmp_path, options, monkeypatch):
    local_run(tmp_path / "ck", steps=(1,))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linked").symlink_to(tmp_path)
    spellings = ["ck", "ck/../ck/", str(tmp_path / "linked/ck")]
    for step, name in enumerate(spellings, 1):
        local_run(tmp_path / "ck", steps=(step,))
        paths = {"tokenizer": f"{name}/step1", "model_group": {"all": name}}
        assert sweep(name if step % 2 else [name], **options, **paths) == 0
        assert {path.name for path in Path(options["out"], "failed").glob("*")} == set()
    out = SweepFolder(options["out"])
    assert out.done() == {"step1", "step2", "step3"}
    assert {written for name in out.done() for written in out.read(name)["model"]} == {"ck"}
    asked = out.manifest()["asked"]
    assert (asked["model"], asked["tokenizer"]) == (["ck"], "ck/step1")
    (tmp_path / "other").symlink_to(tmp_path / "ck")
    for name in ("other", "lab/ck"):  # by whose names results would be others
        hub.add("lab/ck", "step1", checkpoint_files(1))
        with pytest.raises(ValueError, match=f"model was \\['ck'\\], is \\['{name}'\\]"):
            sweep(name, **options, tokenizer="ck/step1")


def test_duplicates_in_folders(tmp_path, capsys):
    local_run(tmp_path / "run", steps=(1, 2))
    write_files(tmp_path / "run" / "step3", checkpoint_files(1))
    assert check(str(tmp_path / "run")) == 1
    assert "same weights: step1, step3" in capsys.readouterr().out


def test_two_names_for_a_step_are_refused(tmp_path, options):
    local_run(tmp_path / "run", steps=(1,))
    local_run(tmp_path / "run", steps=(1,), name="step0{}")
    with pytest.raises(ValueError, match="all name step 1"):
        sweep(str(tmp_path / "run"), **options)
    with pytest.raises(ValueError, match=r"is local. Use steps"):
        sweep(str(tmp_path / "run"), **options, revisions="step1")


def test_an_outlier_among_the_losses_is_named():
    falling = [(f"step{2**k}", 10.0 - k) for k in range(8)]
    assert loss_outliers(falling) == []
    assert loss_outliers([*falling[:4], ("bad", 12.7), *falling[4:]]) == ["bad"]
    assert loss_outliers([*falling[:4], ("final", 2.9), *falling[4:]]) == ["final"]
    assert loss_outliers([*falling, ("last", 11.0)]) == ["last"]
    assert loss_outliers([*falling, ("nan", float("nan"))]) == ["nan"]


def test_stray_files_of_another_machine_stay_and_events_follow_the_parquet_files(tmp_path, options):
    local_run(tmp_path / "run", steps=(1, 2))
    sweep(str(tmp_path / "run"), **options)
    out = Path(options["out"])
    elsewhere = out / "checkpoints" / ".tmp-another-1-step1.parquet"
    elsewhere.write_text("half")
    (out / "checkpoints" / "step1.parquet").unlink()
    next((out / "tensorboard" / "run").glob("*step2")).unlink()
    assert sweep(str(tmp_path / "run"), **options, steps="all") == 0
    assert elsewhere.exists()  # it may be alive
    assert len(list((out / "tensorboard" / "run").glob("events*"))) == 2


@pytest.mark.parametrize("ignored", [(), ("Ġat",)])
def test_token_types_may_be_strings_without_the_mark_of_a_words_start(tmp_path, options, ignored):
    write_files(tmp_path / "model", checkpoint_files(1))
    tokenizer = tokenizer_of(tokenizer_files())
    ignored = tokenizer.convert_tokens_to_ids(list(ignored))
    asked = {"token_tables": True, "types": "string", "ignore_token_ids": ignored}
    assert sweep(str(tmp_path / "model"), **options, **asked) == 0
    ids = tokenize_sequences(["\n".join(TEXT)], tokenizer, seq_len=16, num_tokens=64)
    spelled = {}
    for i in ids.unique().tolist():
        if i not in ignored:
            piece = tokenizer.convert_ids_to_tokens(i)
            spelled.setdefault(piece.removeprefix("Ġ") or piece, []).append(i)
    assert max(map(len, spelled.values())) > 1
    hidden = model(1)(ids, output_hidden_states=True).hidden_states[1].detach().double()
    table = pd.read_parquet(Path(options["out"]) / "tokens" / "model.parquet")
    found = table[table["layer"] == "block.00"].set_index("token_id")
    assert found.index.tolist() == sorted(map(min, spelled.values()))
    for of_string in spelled.values():
        rows = hidden[torch.isin(ids, torch.tensor(of_string))]
        at = found.loc[min(of_string)]
        assert at["n"] == len(rows)
        assert at["M"] == pytest.approx(float(rows.mean(0).square().sum()), rel=1e-5)


def test_tables_are_there_before_the_checkpoint_is_done_and_part_of_the_settings(
    tmp_path, options, written
):
    run = str(local_run(tmp_path / "run", steps=(1,)))
    tables = {"token_tables": True, "spectrum": True, "save_samples": True}
    assert sweep(run, **options, **tables) == 0
    for folder in ("tokens", "projections", "spectra", "samples"):
        assert written.index((folder, set())) < written.index(("checkpoints", set()))
    for name in tables:
        with pytest.raises(ValueError, match=f"{name} was True, is False"):
            sweep(run, **options, **{**tables, name: False})
