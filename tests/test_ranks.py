from threading import Event

import pytest
import torch

from tests.ranks import on_two_ranks

pytestmark = pytest.mark.slow


def fail_on_rank_1(rank):
    # or the other rank may fail first, for want of a peer to connect to
    torch.distributed.barrier()
    if rank == 1:
        raise ZeroDivisionError("on rank 1")


def hang(rank):
    Event().wait()


def test_a_failure_on_one_rank_is_raised(tmp_path):
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="on rank 1"):
        on_two_ranks(fail_on_rank_1, tmp_path)


def test_ranks_that_hang_fail(tmp_path):
    with pytest.raises(pytest.fail.Exception, match="the ranks have hung"):
        on_two_ranks(hang, tmp_path, seconds=1)
