"""Values of several layers, computed side by side on a GPU."""

import pytest
import torch

from embedgeo import full_metrics
from embedgeo.functional import row_scatter, spectrum_values
from embedgeo.functional.rows import row_ids
from embedgeo.geometry.computing import layer_values
from embedgeo.metrics.layer import LayerMetrics
from tests.cuda import GPU
from tests.data import assert_values, gaussian, texts


def spectra():
    """Rows whose spectra are flat, steep, of low rank, of two nearly equal values, of none, tiny,
    and not finite.
    """
    flat = gaussian(400, 200, seed=1).double()
    steep = flat * torch.arange(1, 201) ** -1.0
    twins = flat - flat.mean(0)
    twins = torch.linalg.qr(twins)[0] * torch.tensor([1.0, 1 - 1e-7] + [0.5] * 198)
    return {
        "flat": flat,
        "steep, far from the origin": steep + 1000,
        "of rank 3": flat[:, :3] @ gaussian(3, 200, seed=2).double(),
        "with twins": twins,
        "constant": torch.ones(7, 200, dtype=torch.float64),
        "of one row": flat[:1],
        "of none": flat[:0],
        "tiny": flat * 1e-120,
        "huge": flat * 1e120,
        "too large to be squared": flat * 1e200,
        "wider": gaussian(300, 250, seed=3).double() * torch.arange(1, 251) ** -0.5,
        "with constant coordinates": flat * (torch.arange(200) % 3 > 0),
    }


@pytest.mark.parametrize("name", spectra())
def test_spectra_are_those_on_the_cpu(name):
    x = spectra()[name]
    found = spectrum_values(row_scatter(x.to(GPU)))
    values = {key: value.cpu() for key, value in found.items()}
    assert_values(values, spectrum_values(row_scatter(x)), rtol=1e-9, atol=1e-12)


def layers_of(device, jackknife=0):
    """Layers with the same rows but for some that are NaN, one with fewer token types, and one of
    none.
    """
    x, ids, sequences = texts(900, 12, mean=3.0)
    found = []
    for name in ("whole", "again", "some not finite", "none finite", "of few types"):
        rows = x * (1 + len(found))
        if name == "some not finite":
            rows[::7] = torch.nan
        if name == "none finite":
            rows[:] = torch.inf
        types = ids % 5 if name == "of few types" else ids
        layer = LayerMetrics(full_metrics, 12, device=device, jackknife=jackknife)
        layer.update(rows.to(device), row_ids(rows, types, None, sequences))
        found.append(layer)
    return found


@pytest.mark.parametrize("jackknife", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_layers_side_by_side_have_the_values_of_each_alone_on_the_cpu(jackknife):
    together = layer_values(layers_of(GPU, jackknife))
    for values, alone in zip(together, layers_of(torch.device("cpu"), jackknife), strict=True):
        (expected,) = layer_values([alone])
        assert values.keys() == expected.keys()
        for key, pair in values.items():
            assert pair == pytest.approx(expected[key], rel=1e-5, abs=1e-9, nan_ok=True), key
