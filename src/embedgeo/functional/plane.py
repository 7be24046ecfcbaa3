"""Token types in the plane, to be looked at."""

from torch import Tensor
from torch.nn.functional import pad

from embedgeo.functional.moments import VarianceMoments, pool_groups
from embedgeo.functional.precision import matmul_precision
from embedgeo.functional.processing import principal_axes
from embedgeo.functional.spectrum import Scatter


def type_plane(types: VarianceMoments) -> tuple[Tensor, Tensor]:
    """The means of token types, and the origin, in the plane in which the means vary most.

    Its axes are the principal axes of the means, each counted as often as its type occurs; they point to where the
    largest coordinate is positive. Distances are in embedding units, and (0, 0) is the mean of all rows.

    Args:
        types: moments of each token type.

    Returns:
        The means, shape (T, 2), and the zero vector, shape (2,); the second coordinate is 0 where d = 1, and all are
        NaN where there are no rows.

    >>> import torch
    >>> types = VarianceMoments(torch.tensor([3.0, 1.0]), torch.tensor([[1.0, 5.0], [5.0, 5.0]]), torch.zeros(2))
    >>> type_plane(types)
    (tensor([[-1.,  0.],
            [ 3.,  0.]]), tensor([-2., -5.]))
    """
    n, center, _ = pool_groups(types)
    offset = types.mean - center
    with matmul_precision(offset.device):
        between = offset.T @ (types.n[:, None] * offset)
        axes = principal_axes(Scatter(n, center, (between + between.T) / 2)).axes[:, :2]
        axes = pad(axes, (0, 2 - axes.shape[1]))
        return offset @ axes, -center @ axes
