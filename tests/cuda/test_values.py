"""Values of several layers, computed side by side on a GPU."""

import pytest
import torch

from embedgeo import full_metrics
from embedgeo.functional import row_scatter, spectrum_values
from embedgeo.functional.lockstep import at_once, computed, on_host, steps
from embedgeo.functional.rows import row_ids
from embedgeo.metrics.layer import LayerMetrics
from tests.cuda import GPU, waits
from tests.data import assert_values, floats, gaussian, texts


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


@pytest.mark.parametrize(
    "names", [[each] for each in spectra()] + [[*spectra()]], ids=lambda names: names[0]
)
def test_spectra_of_layers_are_those_of_each_on_the_cpu(names):
    rows = {name: spectra()[name] for name in names}
    scatters = {name: row_scatter(x.to(GPU)) for name, x in rows.items()}
    found = computed(at_once(*(steps(spectrum_values, each) for each in scatters.values())))
    for x, values in zip(rows.values(), found, strict=True):
        assert_values(values, spectrum_values(row_scatter(x)), rtol=1e-9, atol=1e-12)
    assert {value.device.type for values in found for value in values.values()} == {"cpu"}


def test_a_scatter_that_is_not_finite_leaves_those_beside_it_alone():
    whole = row_scatter(spectra()["steep, far from the origin"].to(GPU))
    broken = [
        whole._replace(scatter=whole.scatter * torch.tensor(factor))
        for factor in (torch.nan, torch.inf)
    ]
    overflown = row_scatter((spectra()["flat"] * 1e155).to(GPU))
    scatters = [*broken, whole, overflown]
    *others, last = computed(at_once(*(steps(spectrum_values, each) for each in scatters)))
    assert_values(
        others[2], spectrum_values(row_scatter(spectra()["steep, far from the origin"])), rtol=1e-9
    )
    assert all(each["anisotropy"].isnan() for each in (*others[:2], last))


def test_spectra_of_more_layers_take_no_more_waits(gpu):
    """The certificate of all of them is looked at together."""
    x = spectra()["steep, far from the origin"]
    asked = []
    for count in (1, 4):
        scatters = [row_scatter((x * (1 + i)).to(GPU)) for i in range(count)]
        with waits(gpu) as lines:
            computed(at_once(*(steps(spectrum_values, each) for each in scatters)))
        asked.append(lines.total())
    assert asked[0] == asked[1] <= 2


def test_one_copy_brings_tensors_of_all_dtypes_and_shapes_to_the_host(gpu):
    tensors = [
        torch.arange(6).view(2, 3),
        torch.tensor(2.5, dtype=torch.float64),
        gaussian(3, 5).T,
        torch.tensor([True, False, True]),
        torch.zeros(0, 4),
        torch.arange(5, dtype=torch.int16)[1:],
    ]
    given = [each.to(GPU) for each in tensors]
    with waits(gpu) as lines:
        found = computed(at_once(*(on_host(each, given[0], "a setting") for each in given)))
    assert lines.total() == 1
    for tensor, (copy, first, setting) in zip(tensors, found, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)
        assert torch.equal(first, tensors[0])
        assert setting == "a setting"
    assert floats({"x": found[1][0]}) == {"x": 2.5}


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
    together = computed(
        at_once(*(steps(LayerMetrics.compute, each) for each in layers_of(GPU, jackknife)))
    )
    for values, alone in zip(together, layers_of(torch.device("cpu"), jackknife), strict=True):
        expected = alone.compute()
        assert values.keys() == expected.keys()
        for key, pair in values.items():
            torch.testing.assert_close(
                pair, expected[key], rtol=1e-5, atol=1e-9, equal_nan=True, msg=key
            )
