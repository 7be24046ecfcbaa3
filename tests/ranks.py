"""Run a function on two gloo ranks, or more, each a process of its own, forked from one that has
the imports.
"""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD_SIZE = 2

# once, not on each rank
mp.set_forkserver_preload(["tests.training.on_ranks", "tests.training.steps_on_ranks"])


def on_two_ranks(function, folder, *args, seconds=120, world_size=WORLD_SIZE):
    """What ``function(rank, *args)`` returns on each rank; raises what a rank raises, fails if they
    hang.

    Args:
        function: importable by name; what it returns is saved by ``torch.save``.
        folder: an empty one, for the rendezvous and the results.
        args: passed on.
        seconds: how long all of it may take.
        world_size: how many ranks.
    """
    given = function, folder, args, world_size
    context = mp.start_processes(_on_rank, given, world_size, join=False, start_method="forkserver")
    deadline = time.monotonic() + seconds
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail(f"the ranks have hung for {seconds} seconds")
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


def _on_rank(rank, function, folder, args, world_size):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        f"file://{folder}/init",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        torch.save(function(rank, *args), folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
