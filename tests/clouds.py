"""Rows whose nearest neighbours are hard to find, each for a reason of its own."""

import itertools

import torch

from tests.data import gaussian, generator


def manifold():
    return torch.tanh(gaussian(200, 12) @ gaussian(12, 384, seed=1) / 4)


def clusters():
    """Groups of eight rows at 1e-4 of the distance between groups."""
    return gaussian(40, 32).repeat_interleave(8, 0) + 1e-4 * gaussian(320, 32, seed=1)


def circle():
    """Neighbours nearer than bfloat16 can tell, and not so near that float32 could not."""
    angle = 6.28 * torch.rand(1500, generator=generator(), dtype=torch.float64)
    return torch.stack((angle.cos(), angle.sin()), dim=1)


def outlier():
    x = gaussian(300, 16)
    x[7] *= 1e4
    return x


def shell():
    """The origin is nearer to the last two rows than to the 384 others; all squared distances round
    to 260.
    """
    signs = torch.cartesian_prod(*(torch.tensor([-1.0, 1.0]),) * 4)
    rows = torch.tensor(list(itertools.permutations((16, 1.5, 1, 0.5))))
    nearer = torch.tensor([[16.0, 1, 1, 1]])
    return torch.cat(
        (torch.zeros(1, 4), (signs[:, None] * rows).flatten(0, 1), nearer, -nearer)
    ).double()


def duplicates():
    return gaussian(300, 16)[torch.randint(0, 100, (300,), generator=generator())]


CLOUDS = {
    "gaussian": gaussian(500, 24),
    "one dimension": gaussian(300, 1),
    "manifold": manifold(),
    "mean 1000 x std": 1000 + gaussian(300, 48),
    "manifold at mean 1000 x std": 1000 + manifold(),
    "clusters": clusters(),
    "tight clusters": 1000 + 1e-3 * clusters(),
    "huge": 1e25 * gaussian(300, 16),
    "squares that float32 holds, and some that it does not": 1e19 * gaussian(700, 2),
    "fine beside far off": torch.cat((5e-4 * gaussian(640, 1), 3000 + gaussian(60, 1, seed=1))),
    "tiny": 1e-22 * gaussian(300, 16),
    "tiny beside ordinary": torch.cat((1e-22 * gaussian(150, 16), gaussian(150, 16, seed=1))),
    "circle": circle(),
    "outlier": outlier(),
    "shell": shell(),
    "duplicates": duplicates(),
    "many copies of one row": torch.cat((gaussian(1, 8).expand(40, 8), gaussian(100, 8, seed=1))),
    "grid": torch.cartesian_prod(torch.arange(15.0), torch.arange(15.0)).double(),
    "all at the same distance": torch.eye(64).double(),
    "more at the same distance than are kept": torch.eye(400).double(),
    "few among many": torch.cat((gaussian(700, 3), torch.zeros(12, 3).double() + 40)),
}
