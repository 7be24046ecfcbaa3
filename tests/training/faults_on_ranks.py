"""What two processes do while a failure is injected on one of them, at each collective of a monitor."""

import warnings
from contextlib import ExitStack
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MeanMetric

from embedgeo import StepMonitor
from embedgeo.metrics import IntrinsicDimension, TokenMoments
from tests.models import VOCABULARY, token_batch

STEPS = 2
KINDS = ("before", "after", "first operation", "last operation")


class Injected(TorchDispatchMode):
    """Numbers what torch is called for, operations and collectives, and fails at one of these numbers."""

    def __init__(self, at=None):
        super().__init__()
        self.at = at
        self.events = []
        self.is_inside = False

    def happens(self, kind):
        self.events.append(kind)
        if len(self.events) - 1 == self.at:
            raise torch.OutOfMemoryError("tried to allocate 1.5 EiB")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.is_inside:
            self.happens("operation")
        return func(*args, **(kwargs or {}))

    def watched(self, collective):
        def call(*args, **kwargs):
            self.happens("before")
            self.is_inside = True
            try:
                collective(*args, **kwargs)
            finally:
                self.is_inside = False
            self.happens("after")

        return call

    def on_collectives(self):
        stack = ExitStack()
        for name in ("all_reduce", "all_gather"):
            stack.enter_context(mock.patch.object(dist, name, self.watched(getattr(dist, name))))
        return stack


class MeanOfBatches(MeanMetric):
    """A metric that is none of this package's."""

    def update(self, embeddings, token_ids=None):
        super().update(embeddings.sum())

    def compute(self):
        return {"mean_of_batches": super().compute()}


def some_metrics(dim):
    return [TokenMoments(dim), IntrinsicDimension(dim, batch_size=8), MeanOfBatches()]


def train(rank, injected, **options):
    """A loop with collectives before, in and after each step: their sums, the monitor's history and warnings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, 4))
    options = {"layers": ["0", "1"], "metrics": some_metrics, **options}
    monitor = StepMonitor(model, 1, **options)
    sums = []

    def add(number, collective=dist.all_reduce):
        total = torch.tensor([number + rank])
        collective(total)
        sums.append(int(total))

    def in_monitor(call, *args):
        with injected.on_collectives(), injected:
            call(*args)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            add(10)
            measured = monitor.step(step, token_batch(2, seed=10 * step + rank)["input_ids"])
            in_monitor(measured.__enter__)
            add(20)
            model(token_batch(2, seed=10 * step + rank)["input_ids"]).square().mean().backward()
            in_monitor(measured.__exit__, None, None, None)
            add(30)
        in_monitor(monitor.close)
        add(40)
    warned = [str(w.message) for w in caught if "StepMonitor" in str(w.message)]
    return {"sums": sums, "history": monitor.history, "warned": warned}


def chosen(events):
    """Numbers of the events beside each collective."""
    collectives = [i for i, kind in enumerate(events) if kind == "before"]
    after = [i + 1 for i in collectives]
    operations = [i for i in (*(i - 1 for i in collectives), *(i + 1 for i in after)) if 0 < i < len(events)]
    return sorted({*collectives, *after, *(i for i in operations if events[i] == "operation")})


def at_each_collective(rank, **options):
    """The run without a failure, and the one with a failure on rank 1 at each place, by its number."""
    clean = Injected()
    outcomes = {None: train(rank, clean, **options)}
    places = [chosen(clean.events)]
    dist.broadcast_object_list(places, src=1)
    for place in places[0]:
        outcomes[place] = train(rank, Injected(place if rank else None), **options)
    return outcomes
