"""A tiny training run in a loop of one's own."""

import lightning as L
import pandas as pd
import torch

from embedgeo import StepMonitor
from tests.models import gpt_neox, hooks, token_batch
from tests.training.runs import UserError


class Outcome:
    """What a plain loop leaves: the model, its losses, and the hooks on it before each step and
    after.
    """

    def __init__(self):
        L.seed_everything(0, verbose=False)
        self.model = gpt_neox(hidden_dropout=0.1, attention_dropout=0.1)
        self.losses, self.hooks = [], []


def loop(
    num_steps=6,
    accumulate=1,
    optimizer_inside=False,
    close=True,
    fails_at=None,
    model=None,
    kind=StepMonitor,
    **options,
):
    """Train with AdamW; gives the outcome and the monitor, which is None where no options are
    given.
    """
    made = Outcome()
    model = made.model if model is None else model(made.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = kind(model, **options) if options else None
    for step in range(num_steps):
        made.hooks.append(hooks(made.model))
        for micro in range(accumulate):
            batch = token_batch(seed=step * accumulate + micro)
            with monitor.step(step, batch) if monitor else torch.enable_grad():
                loss = model(**batch, labels=batch["input_ids"]).loss
                if step == fails_at:
                    raise UserError("in the loop's body")
                loss.backward()
                if optimizer_inside and micro == accumulate - 1:
                    optimizer.step()
            made.losses.append(loss.detach().clone())
        if not optimizer_inside:
            optimizer.step()
        optimizer.zero_grad()
    if monitor and close:
        monitor.close()
    made.hooks.append(hooks(made.model))
    return made, monitor


def go_on(monitor, numbers, call, batch=None):
    """Steps of a loop that trains nothing; ``call`` runs the model."""
    for step in numbers:
        with monitor.step(step, batch):
            call()


def run_whole(monitor, number, call, batch=None):
    """So many steps, and the end."""
    with monitor:
        go_on(monitor, range(number), call, batch)


def assert_same_history(monitor, other):
    pd.testing.assert_frame_equal(
        pd.DataFrame(monitor.history), pd.DataFrame(other.history), check_exact=True
    )
