"""What docs/sweep.md promises to say."""

import re
from dataclasses import fields

import pytest

from embedgeo.sweep import SweepSettings
from tests.docs.blocks import text


@pytest.mark.parametrize("option", [field.name for field in fields(SweepSettings)])
def test_every_option_of_a_sweep_is_on_its_page(option):
    assert re.search(rf"--{option.replace('_', '-')}\b", text("docs/sweep.md"))
