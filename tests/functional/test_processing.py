"""After-processing of rows."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from embedgeo.functional import pca_whitening, principal_axes, row_scatter, top_removal, z_scoring
from tests.data import spectral

VARIANCES = [50.0, 9.0, 4.0, 2.0, 1.0, 0.5, 0.2, 0.01]
MEAN = torch.linspace(-3, 20, 8, dtype=torch.float64)


def rows(n=300, dtype=torch.float64):
    return (spectral(n, VARIANCES) + MEAN).to(dtype)


def fitted(process, x):
    """The map that ``process`` names, fitted on the rows of ``x``."""
    scatter = row_scatter(x)
    return {
        "z_scoring": lambda: z_scoring(scatter),
        "pca_whitening": lambda: pca_whitening(principal_axes(scatter)),
        "top_removal": lambda: top_removal(principal_axes(scatter), 3),
    }[process]()


def naive(process, x):
    """What it makes of the rows it was fitted on, from their singular vectors or from
    scikit-learn.
    """
    x = x.double().numpy()
    u, s, v = np.linalg.svd(x - x.mean(0), full_matrices=False)
    if process == "z_scoring":
        return StandardScaler().fit_transform(x)
    if process == "pca_whitening":
        pca = PCA(whiten=True, svd_solver="full").fit(x)
        signs = np.sign(
            pca.components_[np.arange(len(pca.components_)), np.abs(pca.components_).argmax(1)]
        )
        return pca.transform(x) * signs * np.sqrt(len(x) / (len(x) - 1))
    return (u[:, 3:] * s[3:]) @ v[3:]


PROCESS = pytest.mark.parametrize("process", ["z_scoring", "pca_whitening", "top_removal"])


@PROCESS
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 1e-4)],
    ids=str,
)
def test_it_gives_what_the_reference_gives(process, dtype, tolerance):
    x = rows(dtype=dtype)
    mapped = fitted(process, x)(x)
    assert mapped.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert np.abs(mapped.double().numpy() - naive(process, x)).max() < tolerance * 20


@PROCESS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_coordinates_that_do_not_vary_become_zero(process, dtype):
    x = rows(dtype=dtype)
    x[:, 2], x[:, 5] = 1234.5, 0
    mapped = fitted(process, x)(x)
    assert mapped.isfinite().all()
    if process != "pca_whitening":  # there the axes are sorted
        assert mapped[:, [2, 5]].abs().max() < 1e-5
        assert (mapped.abs().amax(0) > 0.01).sum() == 6
    assert principal_axes(row_scatter(x)).rank == 6


@PROCESS
def test_no_rows_give_nan_and_one_row_gives_zero(process):
    x = rows(5)
    assert fitted(process, x[:0])(x).isnan().all()
    assert fitted(process, x[:1])(x[:1]).abs().max() == 0
