"""The workflows and forms of `.github`: `make lint` checks what GitHub asks for, this what the
repository does.
"""

import re
import tomllib
from itertools import product

import pytest
import yaml

from tests.files import ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text()) for path in (GITHUB / "workflows").glob("*.yml")
}
JOBS = {
    f"{workflow} {name}": job
    for workflow, read in WORKFLOWS.items()
    for name, job in read["jobs"].items()
}


def cells(job):
    """What the matrix of a job gives each of its runs."""
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    added = matrix.pop("include", [])
    return [dict(zip(matrix, chosen, strict=True)) for chosen in product(*matrix.values())] + added


def commands(job):
    """What a job runs, in each cell of its matrix."""
    for cell, step in product(cells(job), job["steps"]):
        yield re.sub(
            r"\$\{\{ matrix\.(\w+) \}\}",
            lambda found, cell=cell: str(cell[found[1]]),
            step.get("run", ""),
        )


def made(workflow):
    """The targets that a workflow makes."""
    jobs = WORKFLOWS[workflow]["jobs"].values()
    lines = [line for job in jobs for command in commands(job) for line in command.splitlines()]
    return {target for line in lines if line.startswith("make ") for target in line.split()[1:]}


def test_a_change_has_to_pass_what_a_merge_has():
    parts = re.search(r'EMBEDGEO_CI_PARTS="([a-z -]+)"', (ROOT / ".ci/run").read_text())[1]
    assert set(parts.split()) - {"setup"} <= made("ci")
    assert made("nightly") == {"test-newest"}
    assert made("docs") == {"docs"}


@pytest.mark.parametrize("workflow", ["ci", "nightly"])
def test_every_version_of_python_that_is_promised_is_tested(workflow):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        each.removeprefix("Programming Language :: Python :: ") for each in project["classifiers"]
    }
    promised = {each for each in named if re.fullmatch(r"3\.\d+", each)}
    tested = {cell["python"] for job in WORKFLOWS[workflow]["jobs"].values() for cell in cells(job)}
    assert promised <= tested
    assert project["requires-python"] == f">={min(tested, key=lambda version: int(version[2:]))}"


def test_a_job_may_do_no_more_than_it_has_to():
    may_write = {"docs deploy": {"pages", "id-token"}, "release publish": {"id-token"}}
    assert all(each["permissions"] == {"contents": "read"} for each in WORKFLOWS.values())
    for name, job in JOBS.items():
        assert job["timeout-minutes"] <= 60
        writing = {what for what, may in job.get("permissions", {}).items() if may == "write"}
        assert writing == may_write.get(name, set())
        for step in job["steps"]:
            used = step.get("uses", "actions/none@v1")
            assert re.fullmatch(r"(actions|pypa)/[a-z-]+@(v\d+|release/v1)", used)
            assert not writing or not ("run" in step or "checkout" in used)
            assert "${{ github" not in step.get("run", "")  # a branch or title may be shell code


def test_no_address_is_invented():
    """The repository's address is known to its owner alone."""
    pages = [path for path in GITHUB.rglob("*") if path.is_file()]
    pages += [ROOT / name for name in ("SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md")]
    for page in pages:
        text = page.read_text()
        assert not re.search(r"github\.com/[\w-]+/embedgeo|\w@\w+\.\w+\b|github\.io", text), page


def test_what_the_security_policy_says_is_held_by_the_tests_that_it_names():
    text = (ROOT / "SECURITY.md").read_text()
    file, names = "", []
    for path, name in re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", text):
        file = path or file
        names.append((file, name))
    names = [(file, name) for file, name in names if file]
    assert len(names) > 15
    for file, name in names:
        assert f"def {name}" in (ROOT / file).read_text(), f"{file}::{name}"
