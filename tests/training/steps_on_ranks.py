"""What the processes of the tests of plain torch's parallel forms run: every form, one after the
other.
"""

import logging
import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from embedgeo import Drift, Geometry, IntrinsicDimension, StepMonitor, observe
from embedgeo.functional.distributed import own_group
from tests.models import VOCABULARY, llama, token_batch
from tests.training.faults_on_ranks import at_the_ends, with_failures
from tests.training.on_ranks import batch_of, probe_batches, split
from tests.training.runs import all_warnings, by_step, of_monitors, row_counts, token_moments

STEPS = 5
IN_PARTS = "sequence parallel, hidden states in parts"
FORMS = ("ddp", "fsdp 2", "tensor parallel", "sequence parallel", IN_PARTS)
ON_FOUR = "fsdp 2 and tensor parallel"
REPEATED = ("tensor parallel", "sequence parallel", IN_PARTS)
WITHOUT_MESH = f"{IN_PARTS}, without their mesh"


def new_model():
    torch.manual_seed(0)
    return llama().double()


class Residual(nn.Module):
    """A transformer's blocks without attention, whose residual stream may be in parts along the
    positions.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(VOCABULARY, 16)
        self.h = nn.ModuleList(Normed() for _ in range(2))
        self.ln_f = nn.LayerNorm(16)
        self.double()

    def forward(self, input_ids, attention_mask=None):
        x = self.wte(input_ids)
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.mlp(self.norm(x)).tanh()


def plain(form):
    return Residual() if "sequence parallel" in form else new_model()


def parallel(form):
    """The model in this form, and the monitor's argument for it."""
    model = plain(form)
    if form == "ddp":
        return DistributedDataParallel(model), {}
    if form == "fsdp 2":
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        return sharded(model, mesh), {"device_mesh": mesh}
    if form == "tensor parallel":
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        return split(model, mesh), {"device_mesh": mesh}
    if "sequence parallel" in form:
        mesh = dist.init_device_mesh(
            "cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel")
        )
        tp, local = mesh["tensor_parallel"], {"use_local_output": "in parts" in form}
        table = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), **local)
        parallelize_module(
            model, tp, {"wte": table, "ln_f": SequenceParallel(use_local_output=False)}
        )
        for block in model.h:
            mlp = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(1), **local)
            parallelize_module(block, tp, {"norm": SequenceParallel(**local), "mlp": mlp})
        without = {"process_group": mesh["data_parallel"].get_group()}
        return model, without if form == WITHOUT_MESH else {"device_mesh": mesh}
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return sharded(split(model, mesh["tp"]), mesh["dp"]), {"device_mesh": mesh}


def sharded(model, mesh):
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def source(form, rank):
    """Which of the batches of a step this rank is given."""
    return {**dict.fromkeys((*REPEATED, WITHOUT_MESH), 0), ON_FOUR: rank // 2}.get(form, rank)


def batch_at(form, rank, step):
    if form == ON_FOUR:
        return token_batch(2 + source(form, rank), seed=10 * step + source(form, rank))
    return batch_of(source(form, rank), step)


def sampled_moments(dim):
    return [*token_moments(dim), IntrinsicDimension(dim, 256)]  # of all rows


def run(form, rank):
    """Train in this form, with weights that stay as they are."""
    model, given = parallel(form)
    values = {}
    log = values.__setitem__ if rank else None
    train = StepMonitor(model, 2, window=2, log=log, metrics=token_moments, **given)
    held = StepMonitor(
        model,
        3,
        probe=probe_batches(),
        prefix="held",
        metrics=sampled_moments,
        listeners=[Drift()],
        **given,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with all_warnings() as caught:
        for step in range(STEPS):
            batch = batch_at(form, rank, step)
            with train.step(step, batch), held.step(step, batch):
                out = model(**batch)
                getattr(out, "logits", out).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        train.close()
        held.close()
    histories = {"train": [*train.history], "held": [*held.history]}
    return {**histories, "logged": list(values), "warned": of_monitors(caught)}


def refusals():
    """What is said, at set-up, of meshes of which it is unknown which ranks have the same rows."""
    said = {}
    meshes = {
        "context": {"mesh_shape": (2,), "mesh_dim_names": ("dp_shard_cp",)},
        "other": {"mesh_shape": (2,), "mesh_dim_names": ("x",)},
        "pipeline": {"mesh_shape": (2, 1), "mesh_dim_names": ("pp", "dp")},
        "unnamed": {"mesh_shape": (2,)},
    }
    made = {name: dist.init_device_mesh("cpu", **options) for name, options in meshes.items()}
    made["part"] = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]
    own = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "mdl"))
    given = {name: (new_model(), mesh) for name, mesh in made.items()}
    given["of parameters"] = sharded(split(new_model(), own["mdl"]), own["dp"]), None
    for name, (model, mesh) in given.items():
        if name == "pipeline" and dist.get_rank():  # refused before any rank waits
            continue
        try:
            StepMonitor(model, device_mesh=mesh)
        except ValueError as error:
            said[name] = str(error)
    stage = new_model()
    stage.model.layers = stage.model.layers[:2] if dist.get_rank() else stage.model.layers[2:]
    others = {"stage": (stage, None), "another's": (new_model(), dist.new_group([0]))}
    for name, (model, group) in others.items():
        try:
            with StepMonitor(model, process_group=group).step(0):
                pass
        except ValueError as error:
            said[name] = str(error)
    return said


def of_context_parallelism():
    """What is said of models whose parameters alone tell that ranks have parts of a sequence."""
    one = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("context",))
    # accelerate joins dimensions, also where one of them is 1
    joined, of_data = (
        dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "cp"))
        for shape in ((1, 2), (2, 1))
    )
    meshes = {
        "one": one,
        "joined": joined._flatten("dp_shard_cp"),
        "of data": of_data._flatten("dp_cp"),  # torch takes meshes of one name for one mesh
    }
    said = {}
    for name, mesh in meshes.items():
        model = fully_shard(new_model(), mesh=mesh)
        given = partial(StepMonitor, device_mesh=mesh)
        for how, measure in {"parameters": StepMonitor, "observe": observe, "given": given}.items():
            try:
                with measure(model):
                    pass
                said[name, how] = ""
            except ValueError as error:
                said[name, how] = str(error)
    return said


class Experts(nn.Module):
    """A block in which each rank has experts of its own, under their numbers in the whole model."""

    def __init__(self, rank):
        super().__init__()
        self.experts = nn.ModuleDict({str(rank + i): nn.Linear(16, 16).double() for i in (0, 2)})

    def forward(self, x):
        return x + sum(expert(x) for expert in self.experts.values())


def own_experts(rank, layers, mesh_names=None):
    """A monitor's history and what it says of experts that differ from rank to rank."""
    model = Residual()
    model.h = nn.ModuleList(Experts(rank) for _ in range(2))
    mesh = mesh_names and dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=mesh_names)
    monitor = StepMonitor(model, metrics=token_moments, layers=layers, device_mesh=mesh)
    try:
        with monitor.step(0):
            model(**batch_of(rank, 0))
    except ValueError as error:
        return str(error)
    monitor.close()
    return [*monitor.history]


def by_themselves():
    """What is measured of models in tensor parallel whose mesh is given by their parameters alone,
    also if they are made parallel later, what is said of one without names, and how many files are
    open after another geometry and monitor, and after more of them.
    """
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = new_model()
    options = {"metrics": token_moments, "measure_last": False, "on_error": "raise"}
    with StepMonitor(model, **options) as later, observe(model, metrics=token_moments) as before:
        split(model, mesh)
        monitor = StepMonitor(model, **options)
        with later.step(0), monitor, monitor.step(0), observe(model, metrics=token_moments) as seen:
            model(**batch_of(0, 0))
    tables = [by_step(each.history)[0] for each in (monitor, later)]
    tables += [each.compute() for each in (seen, before)]
    opened = []
    for _ in range(2):
        Geometry(model)
        StepMonitor(model).close()
        opened.append(len(os.listdir("/dev/fd")))
    unnamed = dist.init_device_mesh("cpu", (2,))
    try:
        StepMonitor(split(new_model(), unnamed))
    except ValueError as error:
        return tables, str(error), opened


def closed_at_once():
    """Groups of ranks that end as soon as one rank has made them."""
    for _ in range(200):
        own_group().end()
    return "closed"


def left_out():
    """Rows of a measurement, of models as they are and sharded, of a step that goes on with other
    weights, by hand and by an optimizer.
    """
    counts = []
    for shard in (lambda model: model, fully_shard):
        model = shard(new_model())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with StepMonitor(model, 1, metrics=token_moments, measure_last=False) as monitor:
            for step in (0, 0, 0, 1, 1):
                with monitor.step(step):
                    model(**batch_of(dist.get_rank(), step)).logits.sum().backward()
                if step:
                    with torch.no_grad():
                        next(model.parameters()).add_(0.1)
                else:
                    optimizer.step()
        counts.append(row_counts(monitor))
    return counts


def said(rank):
    """What a monitor prints on this rank; the other one alone has few rows."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    log.addHandler(handler)
    model = Residual()
    monitor = StepMonitor(model, 1, metrics=token_moments, measure_last=False)
    with monitor, monitor.step(0):
        model(**token_batch(2 if rank else 12))
    log.removeHandler(handler)
    return lines


def apart(rank):
    """What is warned of where each rank trains a model of its own, on other tokens, or all train on
    the same ones.
    """
    groups = [dist.new_group([each]) for each in range(2)]
    said = {}
    for name, group in {"in groups": groups[rank], "weights": None, "rows": None}.items():
        model = new_model()
        model.model.embed_tokens.weight.data += rank * (name == "weights")
        monitor = StepMonitor(model, process_group=group, metrics=token_moments, measure_last=False)
        with all_warnings() as caught, monitor, monitor.step(0):
            model(**token_batch(3 + rank * (name != "rows")))
        said[name] = [str(each.message) for each in caught]
    return said


def everything(rank, folder):
    results = {form: run(form, rank) for form in (*FORMS, WITHOUT_MESH)}
    results["refused"] = refusals()
    results["context"] = of_context_parallelism()
    results["closed"] = closed_at_once()
    results["left out"] = left_out()
    results["said"] = said(rank)
    results["apart"] = apart(rank)
    results["by themselves"] = [by_themselves()]
    results["experts"] = {
        "on a mesh": own_experts(rank, "blocks", ("ep", "cp")),
        "of data and model": own_experts(rank, "blocks", ("data", "model")),
        "each": own_experts(rank, "*.experts.*"),
    }
    results |= {"failing": with_failures(rank), **at_the_ends(rank, folder)}
    results["by themselves"].append(by_themselves())  # in another process group
    return results


def on_four(rank):
    return {ON_FOUR: run(ON_FOUR, rank)}
