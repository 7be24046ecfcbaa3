import torch

from embedgeo.functional import token_table, unbiased_split
from embedgeo.functional.split import within_moments
from tests import references
from tests.data import all_nan, assert_values, floats, token_rows


def test_unbiased_split_without_degrees_of_freedom_is_undefined():
    split = floats(unbiased_split(*torch.tensor([4.0, 2.0, 0.0, 0.0])))
    assert all_nan(split)


def test_deviations_within_batches_are_summed_over_batches():
    x, ids = token_rows(100, 3)
    whole, loops = None, []
    for part in (slice(0, 40), slice(40, 40), slice(40, 100)):
        batch = within_moments(token_table(x[part], ids[part]))
        whole = batch if whole is None else whole.merge(batch)
        loops += references.token_loop(x[part], ids[part]).values()
    expected = {"n_with_ids": 100.0, "within_m2": sum(n * v for n, _, v in loops), "within_freedom": 100 - len(loops)}
    assert_values(whole._asdict(), expected, rtol=1e-9)
