"""Functions of the project that one measured step runs: from the start of the batch to its end,
logging included.

python benchmarks/calls.py          numbers, and functions by module
python benchmarks/calls.py --way    also the calls that a number takes from the hook on a layer to
the logger
"""

import argparse
import inspect
import logging
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import embedgeo

SOURCE = f"{Path(embedgeo.__file__).parent}{os.sep}"
NOT_FUNCTIONS = {"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<module>"}
STATIONS = (
    *("ForwardInputs.row_tokens", "Rows.of", "TokenMoments.update_states", "in_sync"),
    *("TokenMoments.compute", "block_means", "Monitor._hear", "HistoryFile.add"),
    *("tagged_scalars", "CSVLogger.log_metrics"),
)
"""Of a number on its way from a batch to a logger."""


class MeasuredStep(embedgeo.GeometryMonitor):
    """A monitor with default metrics that notes the functions of one step, and the stacks at the
    stations of a number.

    Args:
        step: the step.
    """

    def __init__(self, step: int) -> None:
        super().__init__(every_n_steps=step, on_error="raise")
        self.step = step
        self.functions = set[CodeType]()
        self.stacks = dict[str, list[str]]()

    def on_train_batch_start(self, trainer: Trainer, *batch: Any) -> None:
        if trainer.global_step == self.step:
            threading.setprofile(self._note)
            sys.setprofile(self._note)
        super().on_train_batch_start(trainer, *batch)

    def on_train_batch_end(self, trainer: Trainer, *batch: Any) -> None:
        super().on_train_batch_end(trainer, *batch)
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_name
        if event != "call":
            return
        if frame.f_code.co_filename.startswith(SOURCE) and name not in NOT_FUNCTIONS:
            self.functions.add(frame.f_code)
        if frame.f_code.co_qualname in STATIONS:
            self.stacks.setdefault(frame.f_code.co_qualname, _stack(frame))


class Language(LightningModule):
    """GPT-NeoX of 2 blocks."""

    def __init__(self) -> None:
        super().__init__()
        config = GPTNeoXConfig(
            vocab_size=97,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
        )
        self.model = GPTNeoXForCausalLM(config)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def measured_step() -> MeasuredStep:
    """The monitor after a run of three steps, of which the last one has been noted."""
    torch.manual_seed(0)
    ids = torch.randint(97, (3, 4, 32))
    batches = [
        {"input_ids": each, "attention_mask": torch.ones_like(each), "labels": each} for each in ids
    ]
    monitor = MeasuredStep(step=2)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            max_steps=3,
            accelerator="cpu",
            callbacks=[monitor],
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            logger=CSVLogger(folder),
        )
        trainer.fit(Language(), DataLoader(batches, batch_size=None))
    return monitor


def by_module(functions: Iterable[CodeType]) -> dict[str, list[str]]:
    """Names of functions by the module that has them, such as ``capture/probe.py``."""
    modules = dict[str, list[str]]()
    for code in sorted(functions, key=lambda code: (code.co_filename, code.co_firstlineno)):
        modules.setdefault(code.co_filename.removeprefix(SOURCE), []).append(code.co_qualname)
    return modules


def besides_functional(modules: dict[str, list[str]]) -> dict[str, list[str]]:
    return {
        name: functions for name, functions in modules.items() if not name.startswith("functional")
    }


def way_of_a_number(monitor: MeasuredStep) -> list[str]:
    """The calls that lead to each of the stations, in their order."""
    return list(dict.fromkeys(call for station in STATIONS for call in monitor.stacks[station]))


def _stack(frame: FrameType | None) -> list[str]:
    """The project's functions that are running, from the outermost one on."""
    found = []
    while frame is not None:
        if (
            frame.f_code.co_filename.startswith(SOURCE)
            and frame.f_code.co_name not in NOT_FUNCTIONS
        ):
            found.append(
                f"{frame.f_code.co_filename.removeprefix(SOURCE)}: {frame.f_code.co_qualname}"
            )
        frame = frame.f_back
    return found[::-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=inspect.getdoc(sys.modules[__name__]))
    parser.add_argument("--way", action="store_true")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    monitor = measured_step()
    every = by_module(monitor.functions)
    for title, modules in (("in all", every), ("besides functional", besides_functional(every))):
        print(f"{title}: {sum(map(len, modules.values()))} functions in {len(modules)} modules")
    for name, functions in every.items():
        print(f"{name} ({len(functions)}): {', '.join(functions)}")
    if arguments.way:
        way = way_of_a_number(monitor)
        print(f"\nthe way of a number, {len(way)} calls:", *way, sep="\n  ")


if __name__ == "__main__":
    main()
