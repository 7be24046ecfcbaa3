"""What docs/sweep.md promises to say."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from embedgeo.cli import _parser
from embedgeo.sweep import SweepSettings

ROOT = Path(__file__).parents[2]
PAGES = {name: ROOT.joinpath(name).read_text(encoding="utf-8") for name in ("README.md", "docs/sweep.md")}
BLOCKS = [
    block for page in PAGES.values() for block in re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
]
COMMANDS = [
    line
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if re.match(r"embedgeo (sweep|check|report)", line)
]


@pytest.mark.parametrize("option", [field.name for field in fields(SweepSettings)])
def test_every_option_of_a_sweep_is_on_its_page(option):
    assert re.search(rf"--{option.replace('_', '-')}\b", PAGES["docs/sweep.md"])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_on_the_pages_is_one(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    chosen = _parser().parse_args(shlex.split(command, comments=True)[1:])
    if chosen.subcommand == "sweep":
        options = chosen.sweep.as_dict()
        options.pop("config")
        SweepSettings(**options)
