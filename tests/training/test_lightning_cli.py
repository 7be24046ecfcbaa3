"""A monitor in the configuration of a LightningCLI."""

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import Dataset

from embedgeo import GeometryMonitor
from tests.models import token_batch
from tests.training.runs import TinyLM, loader, steps, value


class HeldOut(Dataset):
    """Rows of token ids."""

    def __init__(self, rows: int = 3, *, seed: int = 0) -> None:
        self.batch = token_batch(rows, seed=seed)

    def __len__(self):
        return len(self.batch["input_ids"])

    def __getitem__(self, i):
        return {key: values[i] for key, values in self.batch.items()}


class Trained(TinyLM):
    def __init__(self) -> None:
        super().__init__()

    def train_dataloader(self):
        return loader()


def of_class(path, **init_args):
    return {"class_path": path, "init_args": init_args}


# lightning 2.6 calls old names of jsonargparse
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_all_arguments_can_be_given_and_the_probe_by_class_paths(tmp_path, monkeypatch):
    dataset = of_class(f"{__name__}.HeldOut", rows=8, seed=1)
    monitor = of_class(
        "embedgeo.GeometryMonitor",
        every_n_steps=2,
        extra_steps=[1],
        layers=["embed"],
        measure_last=False,
        folder=str(tmp_path / "told"),
        probe=of_class("torch.utils.data.DataLoader", batch_size=2, dataset=dataset),
        on_error="raise",
    )
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    trainer = {
        **dict.fromkeys(quiet, False),
        "max_steps": 3,
        "accelerator": "cpu",
        "callbacks": [monitor],
        "default_root_dir": str(tmp_path),
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    monkeypatch.setattr("sys.argv", ["train.py", "fit", "--config", str(tmp_path / "config.yaml")])
    saved = {"config_filename": "saved.yaml"}
    cli = LightningCLI(Trained, seed_everything_default=0, save_config_kwargs=saved)
    (made,) = (each for each in cli.trainer.callbacks if isinstance(each, GeometryMonitor))
    assert steps(made) == [0, 1, 2]
    assert value(made, 0, "embed", "n") == 8 * 12
    assert (tmp_path / "told" / "history.parquet").exists()
    saved = yaml.safe_load((tmp_path / "saved.yaml").read_text())["trainer"]["callbacks"][0]
    assert saved["init_args"]["probe"]["class_path"] == "torch.utils.data.DataLoader"
