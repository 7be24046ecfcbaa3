import pytest
import torch

from embedgeo.functional.rows import select_rows
from tests.data import gaussian


@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (3, 1, 2), (0,), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_shape_is_flattened_to_rows(shape, dtype):
    x = torch.ones(*shape, 4, dtype=dtype)
    rows = select_rows(x, torch.ones(shape, dtype=torch.int32), dim=4)
    assert rows.embeddings.shape == (shape.numel() if isinstance(shape, torch.Size) else torch.Size(shape).numel(), 4)
    assert rows.embeddings.dtype == dtype
    assert rows.token_ids.dtype == torch.int64
    assert rows.num_nonfinite == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.float16])
def test_mask_keeps_the_rows_that_count(dtype):
    x, mask = gaussian(6, 4).view(2, 3, 4), torch.tensor([[1, 0, 1], [0, 0, 1]]).to(dtype)
    rows = select_rows(x, torch.arange(6).view(2, 3), mask, dim=4)
    assert rows.token_ids.tolist() == [0, 2, 5]
    assert rows.embeddings.equal(x.view(6, 4)[[0, 2, 5]])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_are_not_finite_are_left_out_and_counted_unless_masked(bad, dtype):
    x = gaussian(5, 4).to(dtype)
    x[1, 2], x[3, 0], x[3, 1] = bad, bad, -bad
    rows = select_rows(x, torch.arange(5), torch.tensor([1, 1, 1, 1, 0]), dim=4)
    assert (rows.token_ids.tolist(), rows.num_nonfinite) == ([0, 2], 2)
    assert select_rows(x, mask=torch.tensor([1, 0, 1, 0, 1]), dim=4).num_nonfinite == 0


def test_rows_whose_sum_overflows_are_finite():
    x = torch.full((3, 4), 6e4, dtype=torch.float16)
    assert select_rows(x, dim=4).embeddings.equal(x)


def test_embeddings_are_detached_and_left_as_they_were():
    x = gaussian(5, 4).requires_grad_()
    before = x.detach().clone()
    assert not select_rows(x, dim=4).embeddings.requires_grad
    assert x.equal(before)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_becomes_float32(dtype):
    x = torch.eye(4).to(dtype)
    assert select_rows(x, mask=torch.tensor([1, 1, 0, 0]), dim=4).embeddings.equal(torch.eye(4)[:2])


X, IDS, MASK = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(2, 3, 5),), ValueError, r"\(\.\.\., 4\); got \(2, 3, 5\)"),
        ((torch.tensor(1.0),), ValueError, r"got \(\)"),
        ((X.long(),), TypeError, "embeddings must be a floating-point tensor; got torch.int64"),
        ((X.tolist(),), TypeError, "got list"),
        ((X, IDS.flatten()), ValueError, r"token_ids must have .* \(2, 3\); got \(6,\)"),
        ((X, IDS.float()), TypeError, "token_ids must be an integer tensor; got torch.float32"),
        ((X, IDS.bool()), TypeError, "token_ids must be an integer tensor; got torch.bool"),
        ((X, [[1, 2, 3]]), TypeError, "token_ids must be a tensor; got list"),
        ((X, None, MASK[:1]), ValueError, r"mask must have .* \(2, 3\); got \(1, 3\)"),
        ((X, None, 2 * MASK), ValueError, "mask must be bool or hold only 0 and 1"),
        ((X, None, -MASK.long()), ValueError, "mask must be bool or hold only 0 and 1"),
        ((X, None, MASK * torch.nan), ValueError, "mask must be bool or hold only 0 and 1"),
        ((X, None, [1, 1]), TypeError, "mask must be a tensor; got list"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        select_rows(*arguments, dim=4)
