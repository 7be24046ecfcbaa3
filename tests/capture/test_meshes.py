"""Meshes of ranks, and what ranks that observe by hand must have in common."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from embedgeo import StepMonitor, observe
from embedgeo.capture.meshes import data_parallel_group
from embedgeo.functional.distributed import num_ranks
from tests.models import gpt_neox, llama, token_batch
from tests.ranks import on_two_ranks
from tests.training.on_ranks import split

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return on_two_ranks(on_rank, folder, folder)


def observed(model):
    with observe(model) as geometry, torch.no_grad():
        model(**token_batch())
    return geometry.compute()["block.01"]["n"]


def in_parallel(names=("tp",)):
    torch.manual_seed(0)
    return split(llama(), init_device_mesh("cpu", (2,), mesh_dim_names=names))


def message(measure, *args, **options):
    try:
        measure(*args, **options)
    except ValueError as error:
        return str(error)


def on_rank(rank, folder):
    model, seen, opened = in_parallel(), [], []
    for _ in range(3):
        seen.append(observed(model))
        StepMonitor(model).close()
        opened.append(len(os.listdir("/dev/fd")))
    later = llama()
    with observe(later) as geometry, torch.no_grad():
        split(later, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
        later(**token_batch())
    seen.append(geometry.compute()["block.01"]["n"])
    meshes = [
        init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", name, "tp"))
        for name, shape in {"cp": (1, 2, 1), "context": (2, 1, 1)}.items()
    ]
    joined = []
    for mesh in meshes:  # as accelerate does
        names = mesh.mesh_dim_names[:2]
        mesh[names]._flatten("_".join(names))
        joined.append(mesh["_".join(names), "tp"])
    results = {
        "context": message(data_parallel_group, joined[0]),
        "of data": num_ranks(data_parallel_group(joined[1])),
        "settings": message(compute, llama(), skip_first_positions=rank),
        "layers": message(compute, gpt_neox(num_hidden_layers=1 + rank), layers="*.mlp"),
    }
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{folder}/again", rank=rank, world_size=2)
    seen.append(observed(in_parallel()))
    return results | {"seen": seen, "opened": opened}


def compute(model, **options):
    with observe(model, **options) as geometry, torch.no_grad():
        model(**token_batch())
    geometry.compute()


def test_rows_of_tensor_parallelism_count_once_whenever_the_model_was_made_parallel(ranks):
    num_rows = int(token_batch()["attention_mask"].sum())
    for rank in ranks:
        assert rank["seen"] == [num_rows] * 5


def test_no_process_group_is_left_by_another_geometry_or_a_monitor_that_is_closed(ranks):
    for rank in ranks:
        assert len({*rank["opened"]}) == 1


def test_a_dimension_that_is_joined_is_of_context_only_where_one_of_its_parts_is(ranks):
    for rank in ranks:
        assert "got cp. Under context parallelism sweep" in rank["context"]
        assert rank["of data"] == 2


def test_ranks_that_observe_with_other_settings_or_layers_are_told_which(ranks):
    for rank in ranks:
        assert "skip_first_positions differs" in rank["settings"]
        assert "layers differs" in rank["layers"]
