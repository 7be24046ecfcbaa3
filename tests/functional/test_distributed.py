"""Without a process group; what two ranks do is in tests/metrics/test_ranks.py."""

from embedgeo.functional.distributed import current_rank, is_distributed


def test_without_a_process_group_the_rank_is_0():
    assert (current_rank(), is_distributed()) == (0, False)
