"""Models spread over devices and the disk by accelerate: the numbers of a model that is in one
place.
"""

import pandas as pd
import pytest

from embedgeo.results.folder import SweepFolder
from embedgeo.sweep import SweepSettings
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import checkpoint_files, local_run, write_files


def require_same(out, whole):
    """The same numbers, standard errors and tables to 1e-9, and nothing left of the files in
    between.
    """
    assert [path.name for path in out.glob(".*")] == []
    mine, theirs = SweepFolder(out), SweepFolder(whole)
    assert mine.done() == theirs.done() != set()
    for name in mine.done():
        frame = mine.read(name)
        assert {"loss", "V_W_over_V"} < set(frame["metric"])
        pd.testing.assert_frame_equal(frame, theirs.read(name), rtol=1e-9, atol=1e-12)
        tables, expected = mine.read_tables(name), theirs.read_tables(name)
        for kind in tables.keys() | expected.keys():
            pd.testing.assert_frame_equal(tables[kind], expected[kind], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_model_on_disk_gives_the_same_numbers(tmp_path, options, kind, caplog):
    run = str(local_run(tmp_path / "run", steps=(1,), kind=kind))
    options |= {"token_tables": True, "layers": ["blocks", "mean(last2)"]}
    maps = {"whole": None, "disk": {"": "disk"}}
    if kind == "gpt2":
        parts = ("wte", "wpe", "h.0", "ln_f")
        maps["parts"] = {f"transformer.{part}": "cpu" for part in parts}
        maps["parts"] |= {"transformer.h.1": "disk", "lm_head": "cpu"}
    for name, device_map in maps.items():
        asked = {**options, "out": tmp_path / name, "device_map": device_map}
        assert sweep(run, **asked) == 0
        require_same(tmp_path / name, tmp_path / "whole")
    assert "offloaded" not in caplog.text  # accelerate says so of every checkpoint


@pytest.mark.slow
def test_auto_and_files_that_are_not_safetensors_in_bfloat16(tmp_path, options):
    write_files(tmp_path / "run" / "step1", checkpoint_files(1, as_bin=True))
    write_files(tmp_path / "run" / "step2", checkpoint_files(2, shards=True))
    options |= {"token_tables": True, "dtype": "bfloat16", "jackknife": 2}
    for device_map in (None, "auto"):
        out = tmp_path / str(device_map)
        asked = {**options, "out": out, "device_map": device_map}
        assert sweep(tmp_path / "run", **asked) == 0
        require_same(out, tmp_path / "None")


def test_nonsense_is_refused():
    for given, why in (
        ({"device_map": "gpus"}, "must be auto, or a mapping of modules to devices; got 'gpus'"),
        ({"device_map": "auto", "device": "cpu"}, "left out with a device, here cpu"),
        ({"device_map": "auto", "model_class": "a.B"}, "left out with a model_class, here a.B"),
    ):
        with pytest.raises(ValueError, match=f"^device_map .*{why}"):
            SweepSettings("m", **given)
