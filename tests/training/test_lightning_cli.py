"""A monitor in the configuration of a LightningCLI."""

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import Dataset

from embedgeo import GeometryMonitor
from tests.models import token_batch
from tests.training.runs import TinyLM, loader, steps, value

# lightning 2.6 calls old names of jsonargparse
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


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


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Trains with the monitor that a configuration makes, and returns it."""
    monkeypatch.setattr("sys.argv", ["train.py", "fit", "--config", str(tmp_path / "config.yaml")])
    return lambda **init_args: trained(tmp_path, init_args)


def trained(folder, init_args):
    monitor = {
        "class_path": "embedgeo.GeometryMonitor",
        "init_args": {"every_n_steps": 2, **init_args},
    }
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = {
        "max_steps": 2,
        "accelerator": "cpu",
        "enable_checkpointing": False,
        **quiet,
        "callbacks": [monitor],
    }
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"trainer": {**trainer, "default_root_dir": str(folder)}})
    )
    cli = LightningCLI(
        Trained, seed_everything_default=0, save_config_kwargs={"config_filename": "saved.yaml"}
    )
    (made,) = (
        callback for callback in cli.trainer.callbacks if isinstance(callback, GeometryMonitor)
    )
    return made


@pytest.mark.parametrize(
    ("arguments", "rows"), [({"init_args": {"rows": 8, "seed": 1}}, 8), ({}, 3)]
)
def test_the_probe_can_be_a_data_loader_of_a_data_set_given_by_their_class_paths(
    run, tmp_path, arguments, rows
):
    dataset = {"class_path": f"{__name__}.HeldOut", **arguments}
    loader_of = {
        "class_path": "torch.utils.data.DataLoader",
        "init_args": {"batch_size": 2, "dataset": dataset},
    }
    monitor = run(probe=loader_of, on_error="raise")
    assert monitor.probe.batch_size == 2
    assert steps(monitor) == [0, 2]
    assert value(monitor, 0, "embed", "n") == rows * 12
    assert yaml.safe_load((tmp_path / "saved.yaml").read_text())["trainer"]["callbacks"][0][
        "init_args"
    ]["probe"]


def test_the_other_arguments_of_the_monitor_can_be_given_too(run, tmp_path):
    monitor = run(
        measure_last=False, folder=str(tmp_path / "told"), extra_steps=[1], layers=["embed"]
    )
    assert steps(monitor) == [0, 1]
    assert (tmp_path / "told" / "history.parquet").exists()
