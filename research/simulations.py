"""Simulated embeddings whose population values are known."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from embedgeo import Geometry, observe


class Corpus:
    """Sequences of token types with Zipf frequencies whose rows share an effect of their sequence.

    A row is the mean of all types + the mean of its type + an effect of its sequence + noise, all
    but the first drawn from a Gaussian with variances that fall over the coordinates.

    Args:
        num_types: number of token types.
        dim: d.
        sequence_effect: standard deviation of the effect of a sequence, where that of the noise is
            0.7.
        document: number of sequences, one after the other, that share an effect, as those cut from
            one document do.
    """

    def __init__(
        self, num_types: int = 5000, dim: int = 32, sequence_effect: float = 0.3, document: int = 1
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.probabilities = 1 / torch.arange(1, num_types + 1, dtype=torch.float64)
        self.probabilities /= self.probabilities.sum()
        self.scale = torch.linspace(1.5, 0.5, dim, dtype=torch.float64)
        self.sequence_effect = sequence_effect
        self.document = document
        means = (
            torch.randn(num_types, dim, dtype=torch.float64, generator=generator) * self.scale * 0.6
        )
        self.means = means + torch.randn(dim, dtype=torch.float64, generator=generator)

    def draw(self, num_sequences: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Embeddings, shape (num_sequences, length, d), and token ids, shape (num_sequences,
        length).
        """
        generator = torch.Generator().manual_seed(seed)
        count = num_sequences * length
        ids = torch.multinomial(self.probabilities, count, replacement=True, generator=generator)
        ids = ids.view(num_sequences, length)
        num_documents = -(-num_sequences // self.document)
        effect = torch.randn(
            num_documents, 1, len(self.scale), dtype=torch.float64, generator=generator
        )
        effect = effect.repeat_interleave(self.document, 0)[:num_sequences]
        noise = torch.randn(
            num_sequences, length, len(self.scale), dtype=torch.float64, generator=generator
        )
        return self.means[ids] + self.scale * (self.sequence_effect * effect + 0.7 * noise), ids

    def population(self) -> dict[str, float]:
        """M/Q, V_W/V, the split of V_W and the mean cosine of rows of different sequences, of all
        there could be.
        """
        mean = self.probabilities @ self.means
        between = self.probabilities @ (self.means - mean).square().sum(1)
        local = self.scale.square().sum() * 0.7**2
        within = self.scale.square().sum() * (self.sequence_effect**2 + 0.7**2)
        offset = mean.square().sum()
        rows = self.draw(400_000, 1, seed=2)[0]  # each in a sequence of its own
        return {
            "M_over_Q": float(offset / (offset + between + within)),
            "V_W_over_V_unbiased": float(within / (within + between)),
            "V_W_local": float(local),
            "V_W_text": float(within - local),
            "V_W_text_over_V_W": float(1 - local / within),
            "mean_cosine": float(
                (rows / rows.norm(dim=-1, keepdim=True)).mean((0, 1)).square().sum()
            ),
        }


class GivenRows(nn.Module):
    """A model whose only layer has the rows that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Identity()

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        return self.rows(x)


def observe_rows(
    metrics: Callable[[int], list[Metric]], jackknife: int
) -> AbstractContextManager[Geometry]:
    """Watch the rows, token ids and masks that the geometry's model is called with."""
    return observe(
        GivenRows(),
        "rows",
        metrics,
        jackknife=jackknife,
        token_ids=lambda batch: batch["ids"],
        mask=lambda batch: batch["mask"],
    )
