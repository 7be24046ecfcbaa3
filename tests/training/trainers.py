"""One training run in three ways: by Lightning, by Hugging Face's Trainer, in a loop of one's own.

All see the same batches in the same order, with the same optimizer.
"""

import random
from collections import deque
from contextlib import ExitStack
from copy import deepcopy
from typing import NamedTuple

import lightning as L
import numpy as np
import torch
import transformers as hf
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from embedgeo import GeometryCallback, GeometryMonitor, StepMonitor
from tests.models import gpt2, hooks, token_batch
from tests.training.hf_runs import hf_trainer
from tests.training.runs import UserError, random_state, trainer

BATCH = 4
ROWS = BATCH * 12  # of a batch; none is padding


def loader(data):
    """These batches in their order."""
    return DataLoader(
        [{k: v[i] for k, v in batch.items()} for batch in data for i in range(BATCH)], BATCH
    )


def batches(number, seed=0):
    """So many batches of token ids, mask and labels."""
    every = [token_batch(BATCH, seed=seed + i) for i in range(number)]
    return [{**batch, "labels": batch["input_ids"]} for batch in every]


class Recorder(torch.optim.SGD):
    """Knows the hooks and the weights that the model has at each step, and may fail at one."""

    def __init__(self, model, fails_at=None):
        super().__init__(model.parameters(), lr=0.05, momentum=0.9)
        self.watched, self.fails_at = model, fails_at
        self.hooks = []
        self.weights = [deepcopy(model.state_dict())]

    def step(self, closure=None):
        loss = super().step(closure)  # Lightning's runs the batch
        self.hooks.append(hooks(self.watched))
        self.weights.append(deepcopy(self.watched.state_dict()))
        if len(self.hooks) - 1 == self.fails_at:
            raise UserError("in the optimizer")
        return loss


class Remembers(LazyModuleMixin, nn.Module):
    """In which a forward pass leaves what it can, and whose output depends on all of it."""

    def initialize_parameters(self, hidden):
        """There are none: it is ready."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))
        self.average = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.calls, self.seen, self.named, self.mean = 0, deque([0.0]), {}, MeanMetric()
        self.drawn = torch.Generator(), np.random.default_rng(0), random.Random(0)

    def forward(self, hidden):
        with torch.no_grad():
            self.passes.data += 1
        self.average.data = 0.9 * self.average.data + 0.1  # as a momentum copy of weights
        self.calls += 1
        self.seen.append(self.seen[-1] + 1)
        self.named.setdefault("last", []).append(self.calls)
        self.mean.update(self.seen[-1])
        self.new = getattr(self, "new", 0) + 1
        ours, numpys, pythons = self.drawn
        drawn = torch.rand((), generator=ours) + numpys.random() + pythons.random()
        left = self.passes + self.calls + self.seen[-1] + len(self.named["last"]) + self.new
        return hidden * (1 + 0.01 * (drawn + left + self.average + self.mean.compute()))


class Task(NamedTuple):
    """What to train, and how."""

    folder: object
    model: nn.Module
    optimizer: Recorder
    data: list
    num_steps: int
    accumulate: int
    evaluates: bool  # after each step
    resumes: bool  # from where the last run in the folder ended


class Module(L.LightningModule):
    def __init__(self, task):
        super().__init__()
        self.model, self.task = task.model, task

    def forward(self, **batch):
        return self.model(**batch)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return self.task.optimizer


class Validated(Module):
    def validation_step(self, batch, batch_idx):
        self.model(**batch)


def by_lightning(task, monitors):
    every = {"check_val_every_n_epoch": None, "val_check_interval": task.accumulate}
    run = trainer(
        task.folder,
        callbacks=monitors,
        max_steps=task.num_steps,
        accumulate_grad_batches=task.accumulate,
        **(every if task.evaluates else {}),
    )
    saved = task.folder / "saved.ckpt"
    run.fit(
        (Validated if task.evaluates else Module)(task),
        loader(task.data),
        loader(task.data[:1]) if task.evaluates else None,
        ckpt_path=saved if task.resumes else None,
    )
    run.save_checkpoint(saved)


class InOrder(hf.Trainer):
    """Takes the batches in their order."""

    task = None

    def get_train_dataloader(self):
        return self.accelerator.prepare(loader(self.task.data))

    def get_eval_dataloader(self, eval_dataset=None):
        return loader(self.task.data[:1])


def by_hugging_face(task, monitors):
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": [None]}
    run = hf_trainer(
        task.folder,
        *monitors,
        kind=InOrder,
        model=task.model,
        optimizers=(task.optimizer, None),
        max_steps=task.num_steps,
        gradient_accumulation_steps=task.accumulate,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="steps",
        save_steps=task.num_steps,
        average_tokens_across_devices=False,
        **(evaluation if task.evaluates else {}),
    )
    run.task = task
    run.model_accepts_loss_kwargs = False  # as others do, the mean of means
    (saved,) = [*task.folder.glob("checkpoint-*")] if task.resumes else [None]
    run.train(resume_from_checkpoint=saved and str(saved))


def by_hand(task, monitors):
    saved = task.folder / "saved.pt"
    first = 0
    if task.resumes:
        states = torch.load(saved)
        first = states.pop("step")
        task.model.load_state_dict(states.pop("model"))
        task.optimizer.load_state_dict(states.pop("optimizer"))
        for monitor, state in zip(monitors, states["monitors"], strict=True):
            monitor.load_state_dict(state)
    with ExitStack() as every:
        for monitor in monitors:
            every.enter_context(monitor)
        for step in range(first, task.num_steps):
            for batch in task.data[step * task.accumulate :][: task.accumulate]:
                with ExitStack() as measured:
                    for monitor in monitors:
                        measured.enter_context(monitor.step(step, batch))
                    (task.model(**batch).loss / task.accumulate).backward()
            task.optimizer.step()
            task.optimizer.zero_grad()
            if task.evaluates:
                task.model.eval()
                with torch.no_grad():
                    task.model(**task.data[0])
                task.model.train()
    monitored = [monitor.state_dict() for monitor in monitors]
    states = {"model": task.model.state_dict(), "optimizer": task.optimizer.state_dict()}
    torch.save({**states, "step": task.num_steps, "monitors": monitored}, saved)


WAYS = {
    "Lightning": (by_lightning, lambda model, **options: GeometryMonitor(**options)),
    "Hugging Face": (by_hugging_face, lambda model, **options: GeometryCallback(**options)),
    "a loop": (by_hand, StepMonitor),
}


class Run(NamedTuple):
    """What training leaves."""

    monitors: list
    model: nn.Module
    hooks: list  # on the model at each optimizer step
    weights: list  # after so many steps
    state: list  # weights, and momenta
    random_state: tuple


def train(
    way,
    folder,
    *options,
    num_steps=7,
    accumulate=1,
    fails_at=None,
    evaluates=False,
    resumes=False,
    dropout=0.0,
    remembers=False,
):
    """Train in one of the ``WAYS``, with a monitor for each of the options."""
    run, make = WAYS[way]
    L.seed_everything(0, verbose=False)
    model = gpt2(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    if remembers:
        model.transformer.drop = Remembers()
    optimizer = Recorder(model, fails_at)
    monitors = [make(model, **each) for each in options]
    data = batches(num_steps * accumulate)
    L.seed_everything(1, verbose=False)
    model.train()
    folder.mkdir(exist_ok=True)
    task = Task(folder, model, optimizer, data, num_steps, accumulate, evaluates, resumes)
    try:
        run(task, monitors)
    except UserError:
        assert fails_at is not None
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    state = [*model.state_dict().values(), *momenta]
    return Run(monitors, model, optimizer.hooks, optimizer.weights, state, random_state())
