"""Any update: right arguments are counted, wrong ones raise the documented error, and compute gives scalars."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data import KINDS, metrics
from tests.strategies import calls


@given(st.sampled_from([1, 3, 40]), st.booleans(), st.data())
def test_any_update_is_counted_or_refused_by_a_documented_error(dim, with_ids, data):
    updates = data.draw(st.lists(calls(dim, with_ids=with_ids), min_size=1, max_size=3))
    before = torch.get_rng_state()
    for kind in KINDS:
        if with_ids or kind != "TokenMoments in a count range":
            update_and_compute(metrics(dim)[kind], updates)
    assert torch.get_rng_state().equal(before)


def update_and_compute(metric, updates):
    for call in updates:
        if call.error is None:
            metric.update(call.embeddings, call.token_ids, call.mask)
        else:
            with pytest.raises(call.error):
                metric.update(call.embeddings, call.token_ids, call.mask)
    if metric.update_called:
        for value in metric.compute().values():
            assert (value.dtype, value.shape, value.requires_grad) == (torch.float64, (), False)
