"""What a sweep does ahead of time and frees early: the next checkpoint takes the place of the
present one.
"""

import threading
from pathlib import Path

import pandas as pd
import pytest

from embedgeo.checkpoints import loading
from embedgeo.geometry import Geometry
from embedgeo.results.folder import SweepFolder
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import local_run

PATIENCE = 30.0


@pytest.fixture
def loads(monkeypatch):
    """Names of the checkpoints that have been loaded, with the thread that did it; and what is
    notified of each.
    """
    seen, changed, load = {}, threading.Condition(), loading.load_model

    def noted(path, *args, **kwargs):
        loaded = load(path, *args, **kwargs)
        with changed:
            seen[path.name] = threading.current_thread()
            changed.notify_all()
        return loaded

    monkeypatch.setattr(loading, "load_model", noted)
    return seen, changed


def records(out):
    return {name: SweepFolder(Path(out)).read(name) for name in SweepFolder(Path(out)).done()}


@pytest.mark.slow
def test_the_next_checkpoint_is_loaded_in_place_of_the_present_one_while_its_metrics_are_computed(
    tmp_path, options, loads, monkeypatch
):
    run = str(local_run(tmp_path / "run", (0, 1, 2)))
    assert sweep(run, **{**options, "steps": 1, "out": str(tmp_path / "alone")}) == 0
    seen, changed = loads
    seen.clear()
    have_weights, compute = [], Geometry.records

    def once_the_next_is_there(self):
        have_weights.append(any(not parameter.is_meta for parameter in self.model.parameters()))
        with changed:
            assert changed.wait_for(lambda: len(seen) >= min(3, len(have_weights) + 1), PATIENCE)
        return compute(self)

    monkeypatch.setattr(Geometry, "records", once_the_next_is_there)
    assert sweep(run, **options) == 0
    assert have_weights == [False] * 3
    assert [thread is threading.main_thread() for thread in seen.values()] == [True, False, False]
    pd.testing.assert_frame_equal(
        records(options["out"])["step1"], records(tmp_path / "alone")["step1"]
    )
