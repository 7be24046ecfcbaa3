import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
import yaml

import embedgeo
from embedgeo import extras
from embedgeo.cli import main
from tests.files import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.slow
def test_what_is_asked_for_is_imported_when_it_is_and_nothing_else():
    """``embedgeo.metrics`` loads scipy, by way of torchmetrics."""
    done = run("""if True:
        import sys
        import embedgeo
        print({"torch", "lightning", "transformers"} & sys.modules.keys())
        print(embedgeo.functional.two_nearest_distances.__name__)
        print({"scipy", "numba", "sklearn", "skdim"} & sys.modules.keys())
        assert not {"metrics", "observe", "text"} & vars(embedgeo).keys()
        import lightning, torch
        before = set(sys.modules)
        from embedgeo import GeometryMonitor
        added = {name.partition(".")[0] for name in sys.modules.keys() - before}
        print(added - sys.stdlib_module_names)
    """)
    lines = ["set()", "two_nearest_distances", "set()", "{'embedgeo'}"]
    assert done.stdout.splitlines() == lines, done.stderr


@pytest.mark.slow
def test_what_is_imported_when_it_is_asked_for_draws_no_random_number():
    """``rich`` does, which lightning imports."""
    code = "import random as r, embedgeo; s = r.getstate(); embedgeo.StepMonitor; "
    assert run(f"{code}print(r.getstate() == s)").stdout == "True\n"


@pytest.mark.parametrize("extra", extras.EXTRA_MODULES)
def test_the_modules_of_an_extra_are_those_of_its_packages(extra):
    """What the error says is missing is what the command that it names installs, and nothing else
    is installed.
    """

    def named(extra):
        return {
            re.match(r"[\w-]+", each)[0].lower() for each in PROJECT["optional-dependencies"][extra]
        }

    distributions = packages_distributions()
    modules = {*extras.EXTRA_MODULES[extra], *extras.COMMAND_MODULES}
    imported = {name.lower() for module in modules for name in distributions[module]}
    packages = named(extra)
    assert packages - {"embedgeo"} <= imported
    if "embedgeo" in packages:
        packages |= named("sweep")
    assert imported <= packages


def test_what_several_packages_miss_is_one_line():
    with pytest.raises(
        ImportError,
        match=r"^it needs no_a, no_b, which are not installed: pip install 'embedgeo\[x\]'$",
    ):
        extras.require_extra("x", "it", "no_a", "torch", "no_b")


def test_the_page_of_installing_shows_what_is_said_without_an_extra(monkeypatch, capsys):
    for module in ("matplotlib", "scipy"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in [name for name in sys.modules if name.startswith("embedgeo.report")]:
        monkeypatch.delitem(sys.modules, module)
    assert main(["report", "a-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line in (ROOT / "docs" / "how-to" / "install.md").read_text()


def test_a_folder_is_not_a_package(tmp_path, monkeypatch):
    tmp_path.joinpath("no_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="it needs no_package, which is not installed"):
        extras.require_extra("datasets", "it", "no_package")


def test_an_unknown_name_is_an_attribute_error():
    done = run("import embedgeo; embedgeo.nothing")
    assert "AttributeError: module 'embedgeo' has no attribute 'nothing'" in done.stderr


def test_the_version_is_the_same_everywhere():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert cited == PROJECT["version"] == embedgeo.__version__


def test_every_extra_is_on_the_page_of_installing_and_those_of_work_on_the_package_are_no_extras():
    page = (ROOT / "docs" / "how-to" / "install.md").read_text()
    assert {*re.findall(r"^\| `(\w+)` \|", page, re.M)} == PROJECT["optional-dependencies"].keys()
    assert not PROJECT["optional-dependencies"].keys() & PYPROJECT["dependency-groups"].keys()
