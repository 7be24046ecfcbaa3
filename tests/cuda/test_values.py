"""Values of several layers, computed side by side on a GPU."""

import pytest
import torch

from embedgeo.functional import row_scatter, spectrum_values
from embedgeo.functional.lockstep import at_once, computed, on_host, steps
from tests.cuda import GPU, waits
from tests.data import assert_values, floats, gaussian


def spectra():
    """Rows whose spectra are flat, steep, of low rank, of two nearly equal values, of none, tiny, and not finite."""
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


@pytest.mark.parametrize("names", [[each] for each in spectra()] + [[*spectra()]], ids=lambda names: names[0])
def test_spectra_of_layers_are_those_of_each_on_the_cpu(names):
    rows = {name: spectra()[name] for name in names}
    scatters = {name: row_scatter(x.to(GPU)) for name, x in rows.items()}
    found = computed(at_once(*(steps(spectrum_values, each) for each in scatters.values())))
    for x, values in zip(rows.values(), found, strict=True):
        assert_values(values, spectrum_values(row_scatter(x)), rtol=1e-9, atol=1e-12)
    assert {value.device.type for values in found for value in values.values()} == {"cpu"}


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
