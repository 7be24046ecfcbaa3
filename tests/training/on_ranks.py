"""What the two processes of the distributed tests run: every strategy, one after the other."""

import os

import lightning as L
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer

from embedgeo import GeometryMonitor
from embedgeo.training.transformers import GeometryCallback
from tests.models import gpt_neox, llama, token_batch
from tests.ranks import WORLD_SIZE
from tests.training.runs import (
    all_warnings,
    moments,
    of_monitors,
    trainer,
)

STEPS, WINDOW = 4, 2
REPEATED = ("tensor parallel", "tensor parallel, a layer in parts")
STRATEGIES = ("ddp", "fsdp 1", "fsdp 2", "fsdp 2, twice", *REPEATED)


def batch_of(rank, step):
    """Unequal numbers of rows on the ranks; once, one rank has nothing but padding."""
    batch = token_batch(4 - rank, seed=10 * step + rank, padding="left" if step % 2 else None)
    if (rank, step) == (1, 2):
        batch["attention_mask"][:] = 0
    return batch


def probe_batches():
    """Five: the last one leaves rank 1 without."""
    return [token_batch(3, seed=100 + i, padding="right" if i == 2 else None) for i in range(5)]


class LaunchedProcess(LightningEnvironment):
    """One of two processes on this machine; Lightning is told so, or it would launch this program
    again.
    """

    creates_processes_externally = True

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.set_world_size(WORLD_SIZE)
        self.set_global_rank(rank)

    def local_rank(self):
        return self.rank


class FixedLM(L.LightningModule):
    """Training that leaves the weights as they are: one model to compare all measurements with."""

    def __init__(self, make=gpt_neox):
        super().__init__()
        torch.manual_seed(0)
        self.model = make()

    def training_step(self, batch, batch_idx):
        return self.model(**batch).logits.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class ShardedInPlace(FixedLM):
    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for number, block in enumerate(self.model.gpt_neox.layers):
            fully_shard(block, mesh=mesh, reshard_after_forward=number > 0)
        fully_shard(self.model, mesh=mesh)

    def validation_step(self, batch, batch_idx):  # before training, too, which leaves weights whole
        self.model(**batch)


class Around(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.lm = model

    def forward(self, **batch):
        return self.lm(**batch)


class ShardedTwice(FixedLM):
    """A model that is sharded, inside of another module that is sharded, too."""

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        self.model = fully_shard(Around(fully_shard(self.model, mesh=mesh)), mesh=mesh)


def split(model, mesh):
    """A Llama in tensor parallel."""
    plan = {
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for block in model.model.layers:
        parallelize_module(block, mesh, plan)
    return model


class TensorParallel(FixedLM):
    def __init__(self):
        super().__init__(lambda: llama().double())

    def configure_model(self):
        split(self.model, self.device_mesh["tensor_parallel"])


class OnCPU(FSDPStrategy):
    """Lightning's FSDP strategy without its GPU: torch takes a CPU only by name."""

    def _setup_model(self, model):
        policy = ModuleWrapPolicy({GPTNeoXLayer})
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), auto_wrap_policy=policy
        )


def prepared(name):
    """The strategy, the module and the layers."""
    if name in REPEATED:
        layers = ["blocks", "*.up_proj"] if "parts" in name else "blocks"
        return (
            ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2),
            TensorParallel(),
            layers,
        )
    return {
        "ddp": lambda: ("ddp", FixedLM(), "blocks"),
        "fsdp 1": lambda: (OnCPU(), FixedLM(), "blocks"),
        "fsdp 2": lambda: (ModelParallelStrategy(2, 1), ShardedInPlace(), "blocks"),
        "fsdp 2, twice": lambda: (ModelParallelStrategy(2, 1), ShardedTwice(), "blocks"),
    }[name]()


def fit_on_rank(rank, folder, name):
    """Histories of a monitor of the training batches and of one of the probe; and what they have
    warned of.
    """
    strategy, module, layers = prepared(name)
    data = [batch_of(0 if name in REPEATED else rank, step) for step in range(STEPS)]
    train = GeometryMonitor(WINDOW, layers=layers, window=WINDOW)
    held = GeometryMonitor(3, layers=layers, probe=probe_batches(), prefix="held")
    warned = run(rank, folder, module, data, train, held, strategy=strategy)
    return {"train": [*train.history], "held": [*held.history], "warned": warned}


def run(rank, folder, module, data, *monitors, **options):
    """Train; gives the monitors' warnings."""
    options = {
        "devices": WORLD_SIZE,
        "max_steps": STEPS,
        "use_distributed_sampler": False,
        **options,
    }
    with all_warnings() as caught:
        here = trainer(
            folder / str(rank), callbacks=list(monitors), plugins=[LaunchedProcess(rank)], **options
        )
        batches = DataLoader(data, batch_size=None)
        here.fit(module, batches, batches if isinstance(module, ShardedInPlace) else None)
    assert here.global_step == STEPS
    assert here.world_size == WORLD_SIZE
    return of_monitors(caught)


class BreaksLater:
    """A probe whose files are gone after the first round."""

    def __iter__(self):
        yield from probe_batches()[:3]
        raise OSError("stale file handle")


FAULTS = {
    "a probe that breaks": ("OSError: stale file handle", BreaksLater()),
    "probes of other batches": (
        "probe must give the same batches on every rank",
        probe_batches()[::-1],
    ),
}
"""What rank 1 says, and its probe."""


def fault_on_rank(rank, folder, probe):
    """Warnings of a monitor that has this probe on rank 1, of a model whose parameters are
    sharded.
    """
    strategy, module, _ = prepared("fsdp 2")
    monitor = GeometryMonitor(2, metrics=moments, probe=probe if rank else probe_batches())
    data = [batch_of(0, step) for step in range(STEPS)]
    return run(rank, folder, module, data, monitor, strategy=strategy)


def hugging_face_on_rank(rank, folder):
    """Two callbacks in a transformers.Trainer under DDP."""
    from tests.training.hf_runs import hf_trainer

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE))
    # asked for, not used: the process group is there
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    train = GeometryCallback(2, on_error="raise")
    held = GeometryCallback(2, probe=probe_batches(), prefix="held", on_error="raise")
    here = hf_trainer(folder / str(rank), train, held, max_steps=3, ddp_backend="gloo")
    before = {name: value.clone() for name, value in here.model.state_dict().items()}
    here.train()
    assert here.args.world_size == WORLD_SIZE
    files = sorted(path.name for path in (folder / str(rank)).glob("*.parquet"))
    return {"train": [*train.history], "held": [*held.history], "weights": before, "files": files}


def everything(rank, folder):
    """One launch for all: starting processes takes longer than what they do."""
    results = {name: fit_on_rank(rank, folder, name) for name in STRATEGIES}
    results["faults"] = {
        name: fault_on_rank(rank, folder, probe) for name, (_, probe) in FAULTS.items()
    }
    results["hugging face"] = hugging_face_on_rank(rank, folder)
    return results
