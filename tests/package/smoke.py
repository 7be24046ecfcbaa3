"""Builds the sdist and, from it, the wheel; looks at both; and uses the wheel in an empty environment: `make package`.

First with the core alone (`core.py`), then with the extras report and sweep (`extras.py`). Says at the end what was
shown, and exits with another status than 0 where something is not as it must be.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
IN_SOURCES = ("embedgeo/__init__.py", "embedgeo/py.typed", "embedgeo/report/page.html.jinja")
IN_WHEEL = (*IN_SOURCES, "embedgeo/configs/pythia.yaml", "embedgeo/reproduce/papers.yaml")
IN_SDIST = (
    *(f"src/{name}" for name in IN_SOURCES),
    *("pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "Makefile"),
    *("constraints.txt", "docs/definitions.md", "examples", "configs", "tests/test_package.py"),
)


def require(holds, rule):
    if not holds:
        sys.exit(f"make package: {rule}")


def run(*command, cwd=None):
    """Run a command without the settings of this process that could lend it packages."""
    lent = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in lent}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, stdin=subprocess.DEVNULL, check=False)
    require(done.returncode == 0, f"{' '.join(map(str, command[:6]))} … failed with status {done.returncode}")


def built(folder):
    """The wheel, built from the sdist: that is tried with it, as a user of the sdist would have it."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    with tarfile.open(sdist) as archive:
        inside = [name.partition("/")[2] for name in archive.getnames()]
    for wanted in IN_SDIST:
        require(any(f"{name}/".startswith(f"{wanted}/") for name in inside), f"the sdist must have {wanted}")
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in IN_WHEEL:
        require(wanted in names, f"the wheel must have {wanted}")
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*") if path.is_file()}
    sources = {name for name in sources if "__pycache__" not in name}
    sources |= {f"embedgeo/configs/{path.name}" for path in (ROOT / "configs").iterdir()}
    packed = {name for name in names if not name.startswith("embedgeo-")}
    require(
        packed == sources,
        f"the wheel must have what src and configs have, and no more; they differ in {packed ^ sources}",
    )
    require(any(name.endswith("licenses/LICENSE") for name in names), "the wheel must have the licence")
    return wheel


def main(folder):
    started = time.monotonic()
    wheel = built(folder / "dist")
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    # --no-compile: most modules of torch are never imported here
    install = (sys.executable, "-m", "pip", "--python", python, "-qq", "--disable-pip-version-check", "--no-input")
    install += ("install", "--no-compile", "--progress-bar", "off", "-c", ROOT / "constraints.txt")
    run(*install, wheel)
    for script, extras in (("core.py", ""), ("extras.py", "[report,sweep]")):
        if extras:
            run(*install, f"{wheel}{extras}")
            run(folder / "venv" / "bin" / "embedgeo", "--help")
        shutil.copy(HERE / script, folder / script)
        run(python, folder / script, folder / "results", cwd=folder)
    seconds = round(time.monotonic() - started)
    print(f"make package: the wheel from the sdist works, alone and with [report,sweep] ({seconds} s)")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="embedgeo-package-") as temporary:
        main(Path(temporary))
