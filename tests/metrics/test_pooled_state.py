"""Names of a state of moments that a metric of one's own has."""

import pytest
from torch import Tensor

from embedgeo.functional.moments import PooledState


@pytest.mark.parametrize(
    "attributes",
    [
        {"powers": ("mean", "m2")},
        {"powers": (("mean",),)},
        {"powers": (("mean", "m2", "m3"),)},
        {"powers": (("mean", "squares"),)},
        {"largest": "n"},
        {"not_pooled": "mean"},
        {"of_coordinates": ("m6",)},
    ],
    ids=str,
)
def test_names_that_cannot_be_pooled_are_refused_when_the_class_is_defined(attributes):
    fields = dict.fromkeys(("n", "mean", "m2", "m3"), Tensor)
    ((name, given),) = attributes.items()
    with pytest.raises(TypeError) as caught:
        type("Wrong", (PooledState,), {"__annotations__": fields, **attributes})
    assert f"{name} of Wrong must be a tuple of" in str(caught.value)
    assert str(caught.value).endswith(f"names of its fields; got {given!r}.")
