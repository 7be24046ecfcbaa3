"""What the README and the documentation show runs as it is shown."""

import re
import shlex
from dataclasses import fields

import pytest
import yaml

from embedgeo import cli
from embedgeo.glossary import known_terms
from embedgeo.options import make_parser
from embedgeo.presets import example_files
from embedgeo.report.runs import read_runs
from embedgeo.report.summary import flags
from embedgeo.sweep import SweepSettings
from tests.docs import blocks
from tests.docs.blocks import PAGES, ROOT
from tests.report.synthetic import everything
from tests.sweep.tiny import checkpoint_files, write_files

WITH_PYTHON = [
    page for page in PAGES if page not in blocks.INTEGRATIONS and blocks.blocks(page, "python")
]
LINES = [
    (page, line.strip())
    for page in PAGES
    for block in blocks.blocks(page, "sh", "shell", "bash", "console")
    for line in re.sub(r"\\\n", " ", block.code).splitlines()
]
WRITTEN = [(page, line) for page, line in LINES if re.match(r"embedgeo\b", line)]
FILES = [
    (page, found)
    for page, line in LINES
    for found in re.findall(r"\b(?:benchmarks|research)/[\w./-]+\w", line)
]
SCRIPTS = re.compile(
    r"(?<![\w/])[\w-]+\.(?:py|ipynb|slurm)\b|(?<=--config )\w+\.yaml|ray-cluster\.yaml"
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
TARGETS = {
    (page, found)
    for page in PAGES
    for found in LINK.findall(re.sub(r"```.*?```", "", blocks.text(page), flags=re.DOTALL))
}


# lightning's and transformers' advice on a run as short, and a machine as small, as these
@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The number of training batches .* is smaller than the logging interval:UserWarning"
)
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
@pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true:UserWarning")
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_every_python_block_runs(page, results, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # monitors draw nothing, which takes most of the time of so short a run
    monkeypatch.setattr("embedgeo.report.live.draw_pictures", lambda *_: ())
    for step in (0, 512):  # in place of the Hub's
        write_files(tmp_path / f"EleutherAI/pythia-70m/step{step}", checkpoint_files(step))
    assert blocks.run(page, blocks.names(results))


@pytest.mark.parametrize(("page", "command"), WRITTEN)
def test_every_command_is_one(page, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    written = shlex.split(command, comments=True)[1:]
    chosen = make_parser(cli.ABOUT, cli.COMMANDS).parse_args(written)
    assert chosen.subcommand == written[0]
    if chosen.subcommand == "sweep":
        options = chosen.sweep.as_dict()
        options.pop("config")
        SweepSettings(**options)


def test_every_file_that_a_command_names_is_there():
    assert not [(page, name) for page, name in FILES if not (ROOT / name).exists()]


def test_every_example_that_a_command_names_was_written_on_its_page():
    """``embedgeo examples NAME`` has come before; what a page gives for granted is nobody's
    example.
    """
    written = {
        (page, path.name)
        for page, line in LINES
        if line.startswith("embedgeo examples ")
        for path in example_files()[line.split()[2]]
    }
    named = {
        (page, found) for page, line in LINES for found in SCRIPTS.findall(line.partition(" #")[0])
    }
    assert len(named) > 5
    assert named <= written


def test_every_yaml_block_loads():
    loaded = [yaml.safe_load(block.code) for page in PAGES for block in blocks.blocks(page, "yaml")]
    assert loaded
    assert all(loaded)


def test_every_language_of_a_block_is_one_that_is_tested():
    languages = {
        found for page in PAGES for found in re.findall(r"^[ \t]*```(\w*)", blocks.text(page), re.M)
    }
    assert languages <= {"", "python", "sh", "yaml", "text"}


def test_links_of_the_readme_lead_to_files_and_others_out_are_well_formed():
    for page, target in TARGETS:
        if re.match(r"\w+:", target):
            assert re.fullmatch(r"https://[\w.-]+\.\w+(/[\w./~%#?=&-]*)?", target), (page, target)
        elif page == "README.md":
            assert (ROOT / target.partition("#")[0]).exists(), target


def test_flags_of_a_report_are_on_the_page(tmp_path):
    table = blocks.text("docs/tutorial/report.md").partition("## Flags")[2].partition("\n## ")[0]
    on_page = re.findall(r"^\| ([^|]+) \|", table, re.M)
    (run,) = read_runs([everything(tmp_path / "sweep")])
    raised = {flag.title for flag in flags(run)}
    assert len(raised) >= 5
    assert raised <= {*on_page}


def test_the_rows_that_a_number_needs_are_those_of_the_page():
    table = blocks.text("docs/sampling.md").partition("## What to take")[2]
    on_page = dict(re.findall(r"^\| `(\w+)`[^|]* \| ([\d,]+) \|", table, re.M))
    needed = {key: term for key, term in known_terms().items() if term.rows}
    assert {key: f"{term.rows:,}" for key, term in needed.items()}.items() <= on_page.items()
    assert len(needed) == 4
    assert on_page["anisotropy"] == f"{128 * known_terms()['anisotropy'].rows_per_dimension:,}"


def test_every_option_of_a_sweep_is_on_its_page():
    page = blocks.text("docs/sweep.md")
    names = [field.name.replace("_", "-") for field in fields(SweepSettings)]
    assert [name for name in names if not re.search(rf"--{name}\b", page)] == []
