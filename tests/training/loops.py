"""A tiny training run in a loop of one's own."""

import lightning as L
import torch

from embedgeo import StepMonitor
from tests.models import gpt_neox, token_batch


def loop(num_steps, accumulate=1, optimizer_inside=False, **options):
    """Train with AdamW; gives the model and the monitor."""
    L.seed_everything(0, verbose=False)
    model = gpt_neox(hidden_dropout=0.1, attention_dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = StepMonitor(model, **options)
    for step in range(num_steps):
        for micro in range(accumulate):
            batch = token_batch(seed=step * accumulate + micro)
            with monitor.step(step, batch):
                model(**batch, labels=batch["input_ids"]).loss.backward()
                if optimizer_inside and micro == accumulate - 1:
                    optimizer.step()
        if not optimizer_inside:
            optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    return model, monitor


def nothing():
    pass


def go_on(monitor, numbers, call=nothing, batch=None):
    """Steps of a loop that trains nothing; ``call`` runs the model."""
    for step in numbers:
        with monitor.step(step, batch):
            call()


def run_whole(monitor, number, call=nothing, batch=None):
    """So many steps, and the end."""
    with monitor:
        go_on(monitor, range(number), call, batch)
