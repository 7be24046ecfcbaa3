"""The Trainer that runs the models of a sweep, and its processes."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch.utils.data import DataLoader, TensorDataset

from embedgeo.results.wording import reason


class Rendezvous(LightningModule):
    """Predicts nothing: the Trainer starts the other processes for it."""

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        """Nothing."""
        return batch_idx


def make_trainer(options: Mapping[str, Any]) -> Trainer:
    """The Trainer: what was asked for, over what a sweep needs.

    Raises:
        ValueError: options that it does not take, or that a sweep decides itself, or a strategy that forgets its
            processes between checkpoints.
    """
    own = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "inference_mode": True,
        "use_distributed_sampler": False,
    }
    taken = sorted(own.keys() & options.keys())
    if taken:
        raise ValueError(f"trainer takes what says where and how to run; a sweep decides {', '.join(taken)} itself.")
    try:
        trainer = Trainer(**{"devices": 1, **options, **own})
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"trainer must be options of lightning's Trainer; got {options} ({error}).") from error
    except Exception as error:  # lightning's MisconfigurationException
        raise ValueError(f"trainer must be options that lightning accepts here; {reason(error)}") from error
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        raise ValueError(  # noqa: TRY004 - it is the user's choice of a value
            "trainer.strategy must keep its processes over the sweep, as ddp does; got one that spawns."
        )
    return trainer


def rendezvous(trainer: Trainer) -> None:
    """Start the other processes, and meet them."""
    if trainer.world_size > 1:
        loader = DataLoader(TensorDataset(torch.zeros(trainer.world_size)))
        trainer.predict(Rendezvous(), loader, return_predictions=False)
