"""What the processes of the tests of pipeline parallelism run: the stages of a small model, under
two schedules.
"""

from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
)
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from embedgeo import StepMonitor
from tests.models import VOCABULARY, token_batch
from tests.training.runs import all_warnings, of_monitors, out_of_memory_on, token_moments

STEPS = 4
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
BOTH = "first", "last"
MLPS = ["block.*", "*.mlp"]
REFUSED = ("mean(last2)", "hidden_states", "nothing*", "layers")


class Transformer(nn.Module):
    """Blocks in which a token knows the mean of those before; without parts that other stages
    have.
    """

    def __init__(self, blocks=(0, 1, 2), *, numbered=False):
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(VOCABULARY, 16)
        layers = {
            str(i): block for i, block in enumerate([Block() for _ in range(3)]) if i in blocks
        }
        self.layers = nn.ModuleDict(layers) if numbered else nn.ModuleList(layers.values())
        self.norm = nn.LayerNorm(16)
        self.double()
        if 0 not in blocks:
            self.tok_embeddings = None
        if 2 not in blocks:
            self.norm = None

    def forward(self, input_ids, attention_mask=None):
        x = input_ids if self.tok_embeddings is None else self.tok_embeddings(input_ids)
        for block in (
            self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers
        ):
            x = block(x)
        return x if self.norm is None else self.norm(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(16, 16)

    def forward(self, x):
        before = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.mlp(before).tanh()


def batch_at(source, step):
    return token_batch(4, seed=10 * step + source, padding="left" if step % 2 else None)


def probe_batches():
    return [token_batch(4, seed=100 + i, padding="right" if i == 1 else None) for i in range(3)]


class Pipeline:
    """The stage on this rank, with its schedule: one block, then two; or all of them in a single
    stage.

    On four ranks there are two such pipelines, or (``other="tp"``) one whose stages are on two
    ranks each.
    """

    def __init__(self, kind="gpipe", *, masked=BOTH, other="dp", num_stages=2):
        sizes = num_stages, dist.get_world_size() // num_stages
        self.mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=("pp", other))
        self.number, self.source = self.mesh.get_coordinate()
        self.is_last = self.number == num_stages - 1
        self.is_masked = BOTH[self.number] in masked
        blocks = ((0,), (1, 2)) if num_stages == 2 else ((0, 1, 2),)
        self.model = Transformer(blocks[self.number], numbered=kind == "gpipe")
        if other == "tp":
            self.source, plan = 0, {"layers.*.mlp": ColwiseParallel(output_layouts=Replicate())}
            parallelize_module(self.model, self.mesh["tp"], plan)
        elif self.mesh.size() > 2:
            fully_shard(self.model, mesh=self.mesh["dp"])
        group = self.mesh.get_group("pp")
        stage = PipelineStage(self.model, self.number, num_stages, torch.device("cpu"), group=group)
        self.schedule = SCHEDULES[kind](
            stage, 2, loss_fn=lambda output, target: output.square().mean()
        )

    def forward(self, run, batch):
        ids, mask = (
            batch["input_ids"],
            {"attention_mask": batch["attention_mask"]} if self.is_masked else {},
        )
        run(*([] if self.number else [ids]), target=ids if self.is_last else None, **mask)

    def run(self, *monitors, gives_batch=True, learning_rate=0.0):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=learning_rate)
        with all_warnings() as caught:
            for step in range(STEPS):
                batch = batch_at(self.source, step)
                with ExitStack() as measured:
                    for monitor in monitors:
                        measured.enter_context(monitor.step(step, batch if gives_batch else None))
                    self.forward(self.schedule.step, batch)
                optimizer.step()
                optimizer.zero_grad()
            for monitor in monitors:
                monitor.close()
        histories = [monitor.history for monitor in monitors]
        return {"histories": histories, "warned": of_monitors(caught)}

    def monitor(self, **options):
        return StepMonitor(
            self.model, 2, device_mesh=self.mesh, **{"metrics": token_moments, **options}
        )

    def probing(self, **options):
        def forward(model, batch):
            self.forward(self.schedule.eval, batch)

        return self.monitor(prefix="held", probe=probe_batches(), probe_forward=forward, **options)


def measured(kind, masked=BOTH, other="dp", **options):
    """Histories of a monitor of the training batches and of one of a probe, and what the chosen
    rank has logged.
    """
    pipeline, logged = Pipeline(kind, masked=masked, other=other), []
    log = (lambda step, values: logged.append(step)) if dist.get_rank() == 1 else None
    train = pipeline.monitor(window=2, log=log, **options)
    held = pipeline.probing(**{**options, "token_ids": None, "mask": None})
    return pipeline.run(train, *([held] if masked else [])) | {"logged": logged}


def weights(*, is_measured):
    """After training, and the random state."""
    pipeline = Pipeline("1f1b")
    pipeline.run(*([pipeline.monitor()] if is_measured else []), learning_rate=0.5)
    return {**pipeline.model.state_dict(), "random": torch.get_rng_state()}


def refusals():
    """What is said at set-up."""
    pipeline, said = Pipeline(), {}
    for name, options in {
        **{name: {"layers": name} for name in REFUSED},
        "probe": {"probe": probe_batches()},
    }.items():
        try:
            pipeline.monitor(**options)
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)
    for name, stages in (
        ("list", [pipeline.model] * 2),
        ("ModuleList", nn.ModuleList([pipeline.model] * 2)),
    ):
        try:
            StepMonitor(stages, device_mesh=pipeline.mesh)
        except TypeError as error:
            said[name] = str(error)
    return said


def on_two(rank):
    ids, mask = (lambda batch: batch["input_ids"]), (lambda batch: batch["attention_mask"])
    without_ids, masked, fault = (Pipeline(masked=masked) for masked in (BOTH, BOTH[:1], BOTH))
    out_of_memory = partial(out_of_memory_on, 1, "compute")
    return {
        "gpipe": measured("gpipe"),
        "1f1b": measured("1f1b", masked=(), token_ids=ids, mask=mask, layers=MLPS),
        "without ids": without_ids.run(without_ids.monitor(), gives_batch=False),
        "masked on one": masked.run(masked.monitor(window=2)),
        "fault": fault.run(fault.monitor(metrics=out_of_memory)),
        "weights": [weights(is_measured=False), weights(is_measured=True)],
        "refused": refusals(),
    }


def on_four(rank):
    return {"gpipe": measured("gpipe"), "tensor parallel": measured("1f1b", other="tp")}


def raise_in_forward(rank):
    """A measured step of training that raises on the first stage; the monitor is closed in a
    ``finally``.
    """
    pipeline = Pipeline(masked=())

    def forward(*call):
        raise ZeroDivisionError("in the forward pass")

    if rank == 0:
        next(pipeline.model.layers.children()).register_forward_hook(forward)
    monitor = pipeline.monitor()
    try:
        with monitor.step(0, batch_at(0, 0)):
            pipeline.forward(pipeline.schedule.step, batch_at(0, 0))
    finally:
        monitor.close()
