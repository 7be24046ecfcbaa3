"""What others offer for the same numbers: packages, and the code that papers publish."""

import runpy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.timing import Side, clocked
from benchmarks.workers import ROOT, Worker

DADAPY = ROOT / ".venv-dadapy" / "bin" / "python"
"""DADApy asks for older versions of numpy, so it is in an environment of its own."""


def scikit_dimension(x: Tensor) -> float:
    import skdim

    return float(skdim.id.TwoNN().fit(x.numpy()).dimension_)


def cdist_topk(x: Tensor) -> Tensor:
    """TwoNN as it is written down in a few lines of torch."""
    nearest = cdist_nearest(x)
    log_mu = (nearest[:, 2] / nearest[:, 1]).log().sort().values[: int(0.9 * len(x))]
    expected = -torch.log1p(-torch.arange(1, len(log_mu) + 1) / len(x))
    return log_mu @ expected / (log_mu @ log_mu)


def cdist_nearest(x: Tensor) -> Tensor:
    """Distances to the row itself and to its two nearest, as float32 gives them: near rows lose
    their digits.
    """
    return torch.cdist(x, x).topk(3, largest=False).values


def whole_scatter(x: Tensor) -> Tensor:
    """The scatter by one product of the centred rows, both halves of it."""
    centred = x - x.mean(0)
    return (centred.T @ centred).double()


def llm_microscope(name: str) -> Callable[..., float]:
    """A function of llm-microscope, whose package cannot be imported: 0.0.7 asks for a module
    ``logit_lens``.
    """
    file = distribution("llm-microscope").locate_file("llm_microscope/functions.py")
    function: Callable[..., float] = runpy.run_path(str(file))[name]
    return function


@contextmanager
def dadapy(x: Tensor) -> Iterator[Side]:
    """DADApy's TwoNN, in a process of its environment that times it itself."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Worker("benchmarks.dadapy_worker", str(DADAPY)) as worker,
    ):
        np.save(file := Path(folder) / "rows.npy", x.numpy())
        yield lambda: worker.seconds(str(file))


@contextmanager
def twonn_peers(x: Tensor) -> Iterator[dict[str, Side]]:
    """The sides that estimate the same dimension; DADApy where its environment is there."""
    sides = {
        "scikit-dimension": clocked(lambda: scikit_dimension(x)),
        "cdist + topk": clocked(lambda: cdist_topk(x)),
    }
    if not DADAPY.exists():
        yield sides
        return
    with dadapy(x) as side:
        yield {**sides, "DADApy": side}


def svd_anisotropy(x: Tensor) -> Tensor:
    values = torch.linalg.svdvals(x - x.mean(0)).square()
    return values[0] / values.sum()


def running_means(x: Tensor, ids: list[int]) -> dict[int, Tensor]:
    """The paper's Algorithm 1, one occurrence at a time."""
    n: dict[int, int] = {}
    mean: dict[int, Tensor] = {}
    mean_norm2: dict[int, Tensor] = {}
    for row, token in zip(x, ids, strict=True):
        seen = n[token] = n.get(token, 0) + 1
        if seen == 1:
            mean[token], mean_norm2[token] = row.clone(), row @ row
        else:
            mean[token] += (row - mean[token]) / seen
            mean_norm2[token] += (row @ row - mean_norm2[token]) / seen
    return mean


def plain_sums(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """What an update of the default metrics sums, as plain lines of torch: no sequences, no rows
    left out.
    """
    types, index, counts = ids.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(types), x.shape[1], dtype=torch.float64).index_add_(0, index, x.double())
    centred = x - x.mean(0)
    scatter = (centred.T @ centred).double()
    return counts, sums, x.double().square().sum(1), scatter, x[torch.randperm(len(x))[:4096]]
