"""A metric from outside the package, in one file: how many coordinates are positive."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embedgeo.functional.moments import PooledState
from embedgeo.glossary import Term, in_group
from embedgeo.metrics.base import GeometryMetric


@dataclass(eq=False)
class SignSums(PooledState):
    """Number of rows, and of those that are positive at each coordinate."""

    n: Tensor
    positive: Tensor

    of_coordinates = ("positive",)


class PositiveShare(GeometryMetric):
    """Share of positive entries, and its largest deviation from a half over the coordinates."""

    terms = in_group(
        "shape",
        340,
        positive_share=Term(
            "positive entries",
            "share of all entries",
            "Half where the cloud is centred at zero.",
            gaussian=0.5,
        ),
        positive_share_spread=Term(
            "spread of positive entries",
            "std over coordinates",
            "Small where no coordinate has a sign of its own.",
        ),
    )

    def __init__(self, dim, **kwargs):
        super().__init__(dim, **kwargs)
        self.declare(SignSums.empty(dim))

    def update_states(self, rows):
        x = rows.embeddings
        self.extend(SignSums(torch.tensor(float(len(x)), device=x.device), (x > 0).sum(0)))

    def compute(self):
        held = self.load(SignSums)
        shares = held.positive / held.n
        return {"positive_share": shares.mean(), "positive_share_spread": shares.std(correction=0)}

    def layer_tables(self):
        return {"signs": lambda: {"positive": self.load(SignSums).positive}}

    @staticmethod
    def baseline(rows):
        return {"positive_share_spread": np.sqrt(0.25 / rows.n)}
