"""What two processes do while a failure is injected on one of them, at each collective of a
monitor.
"""

from contextlib import ExitStack, suppress
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MeanMetric

from embedgeo import Drift, StepMonitor
from embedgeo.metrics import TokenMoments
from tests.models import VOCABULARY, token_batch
from tests.training.runs import UserError, all_warnings, of_monitors

STEPS = 2


class Injected(TorchDispatchMode):
    """Numbers what torch is called for, operations and collectives, and fails at one of these
    numbers.
    """

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


class OtherDigits(MeanOfBatches):
    """A metric whose values differ between ranks in the last digits."""

    def compute(self):
        return {
            "other_digits": super().compute()["mean_of_batches"].double() + 1e-12 * dist.get_rank()
        }


def some_metrics(dim):
    return [TokenMoments(dim), MeanOfBatches()]


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, 4))


def batch_at(rank, step):
    return token_batch(2, seed=10 * step + rank)["input_ids"]


def train(rank, injected, **options):
    """A loop with collectives before, in and after each step: their sums, the monitor's history and
    warnings.
    """
    model = new_model()
    options = {
        "every_n_steps": 1,
        "layers": "0",
        "metrics": some_metrics,
        "measure_last": False,
        **options,
    }
    monitor = StepMonitor(model, **options)
    sums = []

    def add(number, collective=dist.all_reduce):
        total = torch.tensor([number + rank])
        collective(total)
        sums.append(int(total))

    def in_monitor(call, *args):
        with injected.on_collectives(), injected:
            call(*args)

    with all_warnings() as caught:
        for step in range(STEPS):
            add(10)
            measured = monitor.step(step, batch_at(rank, step))
            in_monitor(measured.__enter__)
            add(20)
            model(batch_at(rank, step)).square().mean().backward()
            in_monitor(measured.__exit__, None, None, None)
            add(30)
        in_monitor(monitor.close)
        add(40)
    return {"sums": sums, "history": [*monitor.history], "warned": of_monitors(caught)}


def chosen(events):
    """Numbers of the events beside each collective but the last, after which nothing is exchanged
    any more.
    """
    collectives = [i for i, kind in enumerate(events) if kind == "before"]
    after = [i + 1 for i in collectives]
    beside = {*collectives, *after, *(i - 1 for i in collectives), *(i + 1 for i in after)}
    return sorted(i for i in beside if 0 < i < collectives[-1])


def at_collectives(rank, number, **options):
    """The run without a failure, and those with one on rank 1 at so many places, by the places'
    numbers.
    """
    train(rank, Injected(), **options)  # what is found once in a process takes operations, too
    clean = Injected()
    outcomes = {-1: train(rank, clean, **options)}
    found = chosen(clean.events)
    places = [found[:: max(1, len(found) // number)]]
    dist.broadcast_object_list(places, src=1)
    for place in places[0]:
        outcomes[place] = train(rank, Injected(place if rank else None), **options)
    return outcomes


def with_failures(rank):
    probe = [batch_at(0, 0), batch_at(1, 0), batch_at(2, 0)]
    return {
        "in a step": at_collectives(rank, 6),
        "of the last weights": at_collectives(rank, 3, measure_last=True, every_n_steps=5),
        "of a probe": at_collectives(rank, 3, probe=probe, listeners=[Drift()]),
        "other digits": train(rank, Injected(), metrics=lambda dim: [OtherDigits()]),
    }


def go_on(model, monitor, rank, steps):
    """Train for some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in steps:
        with monitor.step(step, batch_at(rank, step)):
            model(batch_at(rank, step)).square().mean().backward()
        optimizer.step()


def measured_steps(monitor):
    """The steps that were measured, with the numbers of rows."""
    return [
        (record["step"], record["value"]) for record in monitor.history if record["metric"] == "n"
    ]


def monitored(**options):
    """A model, and its monitor."""
    model = new_model()
    return model, StepMonitor(model, 2, layers="0", metrics=some_metrics, **options)


def without_group(rank, folder):
    """Runs whose process group is destroyed before their state is taken and they are closed."""
    outcomes = {}
    for name, options in {"": {}, "nothing left": {"measure_last": False}}.items():
        model, monitor = monitored(**options)
        go_on(model, monitor, rank, range(3 if options.get("measure_last", True) else 4))
        dist.destroy_process_group()
        with all_warnings() as caught:
            monitor.state_dict()
            monitor.close()
        outcomes[name] = measured_steps(monitor), of_monitors(caught)
        dist.init_process_group("gloo", f"file://{folder}/after {name}", rank=rank, world_size=2)
    return outcomes


def failed_at(rank, step):
    """A run that ranks leave by an exception in a step."""
    model, monitor = monitored()
    go_on(model, monitor, rank, range(step))
    with suppress(UserError), monitor.step(step, batch_at(rank, step)):
        model(batch_at(rank, step))
        raise UserError
    monitor.close()
    return measured_steps(monitor)


def unequal(rank):
    """What is said where the last step has more batches on one rank."""
    model, monitor = monitored()
    with all_warnings() as caught:
        go_on(model, monitor, rank, [0, *[1] * (rank + 1)])
        monitor.close()
    return of_monitors(caught)


def at_the_ends(rank, folder):
    return {
        "unequal": unequal(rank),
        "failed": [failed_at(rank, step) for step in (2, 3)],
        "without group": without_group(rank, folder),
    }
