"""What of a sweep on Ray needs no Ray; the rest is in tests/integrations."""

import subprocess
import sys

import pytest

from embedgeo.sweep.settings import SweepSettings
from tests.sweep.conftest import REPOSITORY
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import local_run


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"workers": 2}, "give on=ray with them"),
        ({"resources": {"GPU": 1}}, "give on=ray with them"),
        ({"ray_address": "auto"}, "give on=ray with them"),
        ({"on": "ray", "workers": 0}, "workers must be at least 1; got 0"),
        ({"on": "ray", "resources": {"GPU": -1}}, "resources must be numbers from 0 up"),
        ({"on": "ray", "trainer": {"devices": 2}}, "one process with one device"),
    ],
)
def test_options_that_make_no_sense_are_refused(more, why):
    with pytest.raises(ValueError, match=why):
        SweepSettings(REPOSITORY, **more)


def test_without_ray_the_command_that_installs_it_is_named(options, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"needs ray, which is not installed: pip install 'embedgeo\[ray\]'"):
        sweep(str(local_run(tmp_path / "run")), **options, on="ray")


def test_an_actor_imports_nothing_that_reads_its_environment():
    code = "import sys, embedgeo.sweep.actor; sys.exit('huggingface_hub' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
