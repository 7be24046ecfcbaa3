"""Token types in the plane in which their means vary most, and rows in their own."""

from torch import Tensor
from torch.nn.functional import pad

from embedgeo.functional.processing import principal_axes
from embedgeo.functional.spectrum import Scatter, row_scatter
from embedgeo.functional.tokens import TokenTable


def type_plane(types: TokenTable) -> tuple[Tensor, Tensor]:
    """Project the means of token types, and the zero vector, onto the plane in which the means vary most.

    The axes are the first two principal axes of the means, weighted by the number of rows; the largest coordinate of
    each is positive. Distances are in embedding units, and (0, 0) is the mean of all rows.

    Args:
        types: count and mean of each token type.

    Returns:
        The means, shape (T, 2), and the zero vector, shape (2,). The second coordinate is 0 where d = 1; all are NaN
        where there are no rows.

    >>> import torch
    >>> n, mean = torch.tensor([3.0, 1.0]), torch.tensor([[1.0, 5.0], [5.0, 5.0]])
    >>> type_plane(TokenTable(torch.tensor([7, 9]), n, mean, *torch.zeros(4, 2)))
    (tensor([[-1.,  0.],
            [ 3.,  0.]]), tensor([-2., -5.]))
    """
    n, center, _ = types.pooled()
    offset = types.mean - center
    between = offset.T @ (types.n[:, None] * offset)
    axes = _two_axes(Scatter(n, center, (between + between.T) / 2))
    return offset @ axes, -center @ axes


def row_plane(x: Tensor) -> Tensor:
    """Project rows onto the plane in which they vary most, moved so that the zero vector is at (0, 0).

    The axes are the first two principal axes of the centred rows; the largest coordinate of each is positive. Distances
    are in embedding units.

    Args:
        x: shape (n, d), any floating dtype.

    Returns:
        Shape (n, 2), float64. The second coordinate is 0 where d = 1.

    >>> import torch
    >>> row_plane(torch.tensor([[1.0, 5.0], [5.0, 5.0]]))
    tensor([[1., 5.],
            [5., 5.]], dtype=torch.float64)
    """
    axes = _two_axes(row_scatter(x))
    return x.to(axes.dtype) @ axes


def _two_axes(fitted: Scatter) -> Tensor:
    """The first two principal axes, as columns; the second one is 0 where there is only one."""
    axes = principal_axes(fitted).axes[:, :2]
    return pad(axes, (0, 2 - axes.shape[1]))
