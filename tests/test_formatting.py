from math import inf

import pytest

from embedgeo.formatting import listed, number, printable, short, size, with_error


@pytest.mark.parametrize(
    ("form", "text", "values"),
    [
        (short, "143k", [143_000]),
        (short, "1000", [999.9]),
        (short, "−2.5e−4", [-0.00025]),
        (number, "323,812", [323_812.4]),
        (number, "0.01235", [0.0123456]),
        (number, "0", [-0.0]),
        (size, "537 MB", [536_936_480]),
        (with_error, "0.4123 ± 0.0046", [0.41234, 0.00456]),
        (with_error, "323,800 ± 1,200", [323_812.4, 1_234.0]),
        (with_error, "(2.500 ± 0.031)e-5", [2.5e-5, 3.14e-7]),
        (with_error, "0.5", [0.5, inf]),
        (printable, "a␣b", ["a\tb"]),
        (listed, "0, 1, 2 and 2 more", [range(5), 3]),
    ],
)
def test_numbers_and_names_as_texts(form, text, values):
    assert form(*values) == text
