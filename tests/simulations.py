"""Simulated embeddings whose population values are known."""

import torch
from torch import Tensor


class Corpus:
    """Sequences of token types with Zipf frequencies whose rows share an effect of their sequence.

    A row is the mean of all types + the mean of its type + an effect of its sequence + noise, all but the first drawn from
    a Gaussian with variances that fall over the coordinates.

    Args:
        num_types: number of token types.
        dim: d.
        sequence_effect: standard deviation of the effect of a sequence, where that of the noise is 0.7.
    """

    def __init__(self, num_types: int = 5000, dim: int = 32, sequence_effect: float = 0.3) -> None:
        generator = torch.Generator().manual_seed(1)
        self.probabilities = 1 / torch.arange(1, num_types + 1, dtype=torch.float64)
        self.probabilities /= self.probabilities.sum()
        self.scale = torch.linspace(1.5, 0.5, dim, dtype=torch.float64)
        self.sequence_effect = sequence_effect
        means = torch.randn(num_types, dim, dtype=torch.float64, generator=generator) * self.scale * 0.6
        self.means = means + torch.randn(dim, dtype=torch.float64, generator=generator)

    def draw(self, num_sequences: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Embeddings, shape (num_sequences, length, d), and token ids, shape (num_sequences, length)."""
        generator = torch.Generator().manual_seed(seed)
        count = num_sequences * length
        ids = torch.multinomial(self.probabilities, count, replacement=True, generator=generator)
        ids = ids.view(num_sequences, length)
        effect = torch.randn(num_sequences, 1, len(self.scale), dtype=torch.float64, generator=generator)
        noise = torch.randn(num_sequences, length, len(self.scale), dtype=torch.float64, generator=generator)
        return self.means[ids] + self.scale * (self.sequence_effect * effect + 0.7 * noise), ids

    def population(self) -> dict[str, float]:
        """M/Q, V_W/V and the mean cosine of two distinct rows of different sequences, of all rows there could be."""
        mean = self.probabilities @ self.means
        between = self.probabilities @ (self.means - mean).square().sum(1)
        within = self.scale.square().sum() * (self.sequence_effect**2 + 0.7**2)
        offset = mean.square().sum()
        return {
            "M_over_Q": float(offset / (offset + between + within)),
            "V_W_over_V_unbiased": float(within / (within + between)),
        }
