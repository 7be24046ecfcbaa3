"""Run by a test with a torchmetrics of other names: prints what the metrics give on one process and
on two ranks.
"""

import json
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torchmetrics import Metric

from embedgeo.functional.rows import row_ids
from embedgeo.metrics import Anisotropy, TokenMoments
from embedgeo.metrics.layer import LayerMetrics
from tests.ranks import on_two_ranks

DIM = 3


class Largest(Metric):
    """A metric of another package, which is gathered: the largest entry, and which of the keywords
    it was given.
    """

    def __init__(self):
        super().__init__()
        self.add_state("largest", torch.tensor(-torch.inf), dist_reduce_fx="max")

    def update(self, embeddings, token_ids):
        self.largest = torch.maximum(self.largest, embeddings.max() + 0 * token_ids.max())

    def compute(self):
        return {"largest": self.largest}


def rows():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, DIM, generator=generator, dtype=torch.float64), torch.arange(40) % 7


def make(dim):
    return [TokenMoments(dim), Anisotropy(dim), Largest()]


def values_on(rank=0, num_ranks=1):
    """Values of the metrics of a layer, and of metrics by themselves, by `compute` and by
    `forward`.
    """
    x, ids = rows()
    x, ids = x[rank::num_ranks], ids[rank::num_ranks]
    layer = LayerMetrics(make, DIM, device=torch.device("cpu"))
    layer.update(x, row_ids(x, ids))
    found = {f"layer {key}": float(pair[0]) for key, pair in layer.compute().items()}
    for metric in make(DIM)[:2]:
        metric.half().update(x, ids)
        first, again = metric.compute(), metric.compute()
        found |= {f"{type(metric).__name__} {key}": float(value) for key, value in first.items()}
        assert all(torch.equal(value, again[key]) or value.isnan() for key, value in first.items())
        if "n" in first:
            assert float(metric(x, ids)["n"]) == len(x)
            assert float(metric.compute()["n"]) == 80
    return found


def values_alone_on(rank):
    """The refusal of a metric by itself, whose states torchmetrics gathers one by one."""
    x, ids = rows()
    metric = TokenMoments(DIM)
    metric.update(x, ids)
    try:
        metric.compute()
    except RuntimeError as error:
        return str(error)
    return "no error"


def main():
    warnings.simplefilter("error")
    with TemporaryDirectory() as folder:
        function, *arguments = (values_alone_on,) if sys.argv[1:] else (values_on, 2)
        ranks = on_two_ranks(function, Path(folder), *arguments)
    print(json.dumps({"one": values_on(), "ranks": ranks}))


if __name__ == "__main__":
    main()
