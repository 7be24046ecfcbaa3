"""Occurrences of chosen token types; `test_every_metric.py` leaves this metric out, for it has no
values.
"""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

from embedgeo.functional import row_plane
from embedgeo.functional.sampling import row_keys
from embedgeo.metrics import TokenOccurrences
from tests.data import token_rows

N, DIM = 400, 6


def rows():
    x, ids = token_rows(N, DIM, mean=3.0)
    frequent = ids.unique(return_counts=True)
    types = frequent[0][frequent[1].argsort(descending=True)]
    return x, ids, [types[0].item(), types[2].item(), types[-1].item()]


def assert_same_planes(got, want):
    assert got["token_id"].equal(want["token_id"])
    for key in ("pc1", "pc2"):
        torch.testing.assert_close(got[key], want[key], rtol=1e-9, atol=1e-12)


def test_occurrences_are_those_with_the_smallest_keys_in_the_plane_of_their_own_axes():
    x, ids, types = rows()
    metric = TokenOccurrences(DIM, types, most=8)
    metric.update(x, ids)
    keys = row_keys(0, N, seed=0)
    places = []
    for token_id in sorted(types):
        of_type = (ids == token_id).nonzero().flatten()
        places += sorted(of_type[keys[of_type].argsort()][:8].tolist())
    plane = metric.plane()
    assert plane["token_id"].tolist() == ids[places].tolist()
    assert_same_planes(
        plane,
        {"token_id": ids[places], **dict(zip(("pc1", "pc2"), row_plane(x[places]).T, strict=True))},
    )
    shown = x[places].numpy()
    spread = np.linalg.svd(shown - shown.mean(0), compute_uv=False)[:2] ** 2 / len(shown)
    np.testing.assert_allclose(
        [plane["pc1"].var(correction=0), plane["pc2"].var(correction=0)], spread, rtol=1e-9
    )
    assert metric.compute() == {}


@pytest.mark.parametrize("cuts", [[150, 250], [1, 0, 399], [7] * 57 + [1]])
def test_any_split_into_updates_gives_the_same_occurrences(cuts):
    x, ids, types = rows()
    x[[3, 200]] = torch.nan  # left out, and no other row is drawn in another one's place
    one, parted = (TokenOccurrences(DIM, types, most=8) for _ in range(2))
    one.update(x, ids)
    for part, of_part in zip(x.split(cuts), ids.split(cuts), strict=True):
        parted.update(part, of_part)
    assert_same_planes(parted.plane(), one.plane())


def test_merged_metrics_hold_at_most_as_many_occurrences_of_each_type():
    x, ids, types = rows()
    parts = [TokenOccurrences(DIM, types, most=8, seed=seed) for seed in (1, 2)]
    for part, half in zip(parts, (slice(0, N // 2), slice(N // 2, N)), strict=True):
        part.update(x[half], ids[half])
    parts[0].merge_state(parts[1])
    found, counts = parts[0].plane()["token_id"].unique(return_counts=True)
    assert dict(zip(found.tolist(), counts.tolist(), strict=True)) == {
        token_id: min(8, int((ids == token_id).sum())) for token_id in sorted(types)
    }


def test_occurrences_of_two_metrics_of_one_seed_are_drawn_as_one_draws_them():
    x, ids, types = rows()
    whole, few = (TokenOccurrences(DIM, types, most=most) for most in (N, 8))
    whole.update(x, ids)
    parts = [TokenOccurrences(DIM, types, most=N) for _ in range(2)]
    for part, half in zip(parts, (slice(0, N // 2), slice(N // 2, N)), strict=True):
        part.update(x[half], ids[half])
    parts[0].merge_state(parts[1])
    assert_same_planes(parts[0].plane(), whole.plane())
    few.update(x, ids)
    with pytest.raises(ValueError, match="Give them different seeds"):
        few.merge_state(few.clone())


def reloaded(metric):
    """A new metric with the state dict of this one, as it is saved and read."""
    new = TokenOccurrences(DIM, metric.token_types, metric.most, metric.seed)
    for each in (metric, new):
        each.persistent(True)
    file = io.BytesIO()
    torch.save(metric.state_dict(), file)
    file.seek(0)
    new.load_state_dict(torch.load(file))
    return new


TWINS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda metric: pickle.loads(pickle.dumps(metric)),
    "state dict": reloaded,
    "half": lambda metric: metric.half(),
    "bfloat16": lambda metric: metric.to(torch.bfloat16),
}


@pytest.mark.parametrize("twin", TWINS.values(), ids=TWINS)
def test_copies_saved_and_cast_ones_go_on_with_the_same_occurrences(twin):
    x, ids, types = rows()
    expected, metric = (TokenOccurrences(DIM, types, most=8) for _ in range(2))
    expected.update(x, ids)
    metric.update(x[:150], ids[:150])
    before = metric.plane()
    other = twin(metric)
    assert_same_planes(other.plane(), before)
    other.update(x[150:], ids[150:])
    assert_same_planes(other.plane(), expected.plane())
    if other is not metric:
        assert_same_planes(metric.plane(), before)
