"""Builds the sdist and, from it, the wheel; looks at both; and uses the wheel in an empty
environment: `make package`.

First with the core alone (`core.py`), then with the extras report and sweep (`extras.py`), then
with all, in which README.md, the tutorials and how-tos run from top to bottom (`pages.py`). Says at
the end what was shown, and exits with another status than 0 where something is not as it must be.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
IN_SOURCES = ("embedgeo/__init__.py", "embedgeo/py.typed", "embedgeo/report/page.html.jinja")
IN_WHEEL = (*IN_SOURCES, "embedgeo/configs/pythia.yaml")
SHIPPED = ("configs", "examples")
ADDRESS = "https://git.example/owner/embedgeo"
PAGES = {
    "tutorial": [
        "README.md",
        *sorted(f"docs/tutorial/{path.name}" for path in ROOT.glob("docs/tutorial/*.md")),
    ],
    "how-to": sorted(f"docs/how-to/{path.name}" for path in ROOT.glob("docs/how-to/*.md")),
}
ELSEWHERE = {"docs/how-to/loggers.md", "docs/how-to/distributed.md"}
"""Pages that need more than the extras: loggers (`make integrations`), or the tests' own pipeline.
"""

IN_SDIST = (
    *(f"src/{name}" for name in IN_SOURCES),
    *(
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "Makefile",
    ),
    *("constraints.txt", "docs/definitions.md", "examples", "configs", "tests/test_package.py"),
)


def require(holds, rule):
    if not holds:
        sys.exit(f"make package: {rule}")


def run(*command, cwd=None, **variables):
    """Run a command without the settings of this process that could lend it packages, or an
    address.
    """
    lent = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "EMBEDGEO_REPOSITORY")
    kept = {name: value for name, value in os.environ.items() if name not in lent}
    options = {"cwd": cwd, "env": kept | variables, "stdin": subprocess.DEVNULL}
    words = [*map(str, command)]
    status = subprocess.run(words, check=False, **options).returncode
    require(status == 0, f"{' '.join(words[:6])} … failed with status {status}")


def built(folder):
    """The wheel, built from the sdist as for a release: that is tried with it, as a user of the
    sdist would have it.
    """
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, EMBEDGEO_REPOSITORY=ADDRESS)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    with tarfile.open(sdist) as archive:
        inside = [name.partition("/")[2] for name in archive.getnames()]
    for wanted in IN_SDIST:
        require(
            any(f"{name}/".startswith(f"{wanted}/") for name in inside),
            f"the sdist must have {wanted}",
        )
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in IN_WHEEL:
        require(wanted in names, f"the wheel must have {wanted}")
    sources = {
        str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*") if path.is_file()
    }
    sources = {name for name in sources if "__pycache__" not in name}
    for shipped in SHIPPED:
        sources |= {
            f"embedgeo/{shipped}/{path.name}"
            for path in (ROOT / shipped).glob("[!.]*")
            if path.is_file()
        }
    packed = {name for name in names if not name.startswith("embedgeo-")}
    require(
        packed == sources,
        f"the wheel must have what src, configs and examples have, and no more; they differ in "
        f"{packed ^ sources}",
    )
    require(
        any(name.endswith("licenses/LICENSE") for name in names), "the wheel must have the licence"
    )
    (metadata,) = (name for name in names if name.endswith("/METADATA"))
    look_at_page(zipfile.ZipFile(wheel).read(metadata))
    return wheel


def look_at_page(metadata):
    """What PyPI shows: where the repository's address is known all links lead there."""
    linked = re.findall(r"\]\(([^)]+)\)", metadata.decode())
    require(len(linked) > 10, "the README must have its links")
    astray = [link for link in linked if not link.startswith(("https://", "#"))]
    require(
        not astray, f"links of the README must be absolute where the address is known; got {astray}"
    )
    require(
        f"Project-URL: Source, {ADDRESS}\n" in metadata.decode(),
        "the package must name its repository",
    )


def with_sources(folder):
    """A folder with the pages and what they are given, without the package."""
    for name in ("docs", "tests"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "README.md", folder)
    return folder


def run_pages(python, folder, sources, kind):
    """Run pages from top to bottom, in folders that hold nothing."""
    pages = [page for page in PAGES[kind] if page not in ELSEWHERE]
    alone = {"PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"}
    run(python, "-m", "tests.package.pages", folder / kind, *pages, cwd=folder, **alone)


def main(folder):
    started = time.monotonic()
    wheel = built(folder / "dist")
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    # --no-compile: most modules of torch are never imported here
    quiet = "-qq --disable-pip-version-check --no-input install --no-compile --progress-bar off"
    install = sys.executable, "-m", "pip", "--python", python, *quiet.split()
    install += "-c", ROOT / "constraints.txt"
    run(*install, wheel)
    for script, extras in (("core.py", ""), ("extras.py", "[report,sweep]")):
        if extras:
            run(*install, f"{wheel}{extras}")
            run(folder / "venv" / "bin" / "embedgeo", "--help")
        shutil.copy(HERE / script, folder / script)
        run(python, folder / script, folder / "results", cwd=folder)
    run(*install, f"{wheel}[all]")
    with ThreadPoolExecutor(len(PAGES)) as side_by_side:
        list(
            side_by_side.map(
                partial(run_pages, python, folder, with_sources(folder / "sources")), PAGES
            )
        )
    seconds = round(time.monotonic() - started)
    print(
        f"make package: the wheel from the sdist works, alone, with [report,sweep] and with [all] "
        f"({seconds} s)"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="embedgeo-package-") as temporary:
        main(Path(temporary))
