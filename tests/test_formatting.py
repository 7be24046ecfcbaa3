from math import inf

import pytest

from embedgeo.formatting import listed, number, printable, short, size, with_error


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (143_000, "143k"),
        (2e6, "2M"),
        (999.9, "1000"),
        (0.12345, "0.123"),
        (1e-7, "1e−7"),
        (2.0000001e-5, "2e−5"),
        (-0.00025, "−2.5e−4"),
    ],
)
def test_numbers_on_axes(value, text):
    assert short(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(323_812.4, "323,812"), (0.0123456, "0.01235"), (7.0, "7"), (-0.0, "0")]
)
def test_numbers_in_sentences(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(536_936_480, "537 MB"), (88, "88 B"), (24_664, "24.7 kB")]
)
def test_numbers_of_bytes(num_bytes, text):
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0.41234, 0.00456, "0.4123 ± 0.0046"),
        (323_812.4, 1_234.0, "323,800 ± 1,200"),
        (2.5e-5, 3.14e-7, "(2.500 ± 0.031)e-5"),
        (0.5, inf, "0.5"),
    ],
)
def test_numbers_with_errors_have_two_digits_of_the_error(value, error, text):
    assert with_error(value, error) == text


def test_names_in_one_line():
    assert printable("a" + chr(9) + "b") == "a␣b"
    assert listed(["a", "b"]) == "a, b"
    assert listed(range(5), most=3) == "0, 1, 2 and 2 more"
