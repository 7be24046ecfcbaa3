"""Rows and models for timing: the same in every process."""

import numpy as np
import torch
from torch import Tensor, nn

from embedgeo.geometry import Geometry

VOCABULARY = 50_304


def gaussian(n: int, d: int) -> Tensor:
    """The worst case of TwoNN: all distances are alike."""
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0))


def manifold(n: int, d: int) -> Tensor:
    """Rows on a manifold of 12 dimensions."""
    g = torch.Generator().manual_seed(0)
    return torch.tanh(torch.randn(n, 12, generator=g) @ torch.randn(12, d, generator=g) / 3)


def zipf_tokens(*shape: int, num_types: int = VOCABULARY) -> Tensor:
    weights = 1 / np.arange(1, num_types + 1) ** 1.07
    return torch.from_numpy(
        np.random.default_rng(0).choice(num_types, shape, p=weights / weights.sum())
    )


class Still(nn.Module):
    """A model whose layers give rows that are there already, so that what is timed is the
    measurement alone.
    """

    def __init__(self, hidden: Tensor, num_layers: int, num_types: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_types, 1)
        self.blocks = nn.ModuleList(_Given(hidden + i) for i in range(num_layers))

    def forward(self, token_ids: Tensor) -> None:
        self.embedding(token_ids)
        for block in self.blocks:
            block()


class Measurement:
    """A measurement of Gaussian rows by all default metrics: `update` and `compute`, one after the
    other.

    Args:
        batch: sequences and their length.
        d: the width of the layers.
        num_layers: how many.
        num_types: token types to draw from, Zipf distributed.
    """

    def __init__(
        self, batch: tuple[int, int], d: int, num_layers: int = 1, num_types: int = VOCABULARY
    ) -> None:
        torch.manual_seed(0)
        self.token_ids = zipf_tokens(*batch, num_types=num_types)
        self.model = Still(torch.randn(*batch, d), num_layers, num_types)
        self.geometry = Geometry(self.model, layers="blocks.*")

    def update(self) -> None:
        self.geometry.reset()
        with torch.no_grad(), self.geometry.probe:
            self.model(self.token_ids)

    def compute(self) -> None:
        """The values of what the last `update` saw; to be called again and again."""
        self.geometry.records()


class _Given(nn.Module):
    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self) -> Tensor:
        return self.hidden
