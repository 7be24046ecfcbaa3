"""Models spread over devices and the disk by accelerate: the numbers of a model that is in one
place.
"""

import re
from pathlib import Path

import pandas as pd
import pytest

from embedgeo import cli
from embedgeo.results.folder import SweepFolder
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import checkpoint_files, local_run, write_files

STACKS = {"gpt_neox": "gpt_neox.layers", "gpt2": "transformer.h", "bert": "bert.encoder.layer"}
PARTS = {kind: {"": "cpu", f"{stack}.1": "disk"} for kind, stack in STACKS.items()}


def require_same(out: Path, whole: Path) -> None:
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
@pytest.mark.parametrize("kind", STACKS)
def test_a_model_partly_or_wholly_on_disk_gives_the_same_numbers(tmp_path, options, kind, caplog):
    run = str(local_run(tmp_path / "run", steps=(1,), kind=kind))
    options |= {"token_tables": True, "layers": ["blocks", "mean(last2)"]}
    maps = {"whole": None, "parts": PARTS[kind], "disk": {"": "disk"}}
    for name in ("whole", "disk" if kind == "gpt2" else "parts"):
        asked = {**options, "out": str(tmp_path / name), "device_map": maps[name]}
        assert sweep(run, **asked) == 0
        require_same(tmp_path / name, tmp_path / "whole")
    assert "offloaded" not in caplog.text  # accelerate says so of every checkpoint


@pytest.mark.slow
def test_auto_and_files_that_are_not_safetensors_in_bfloat16(tmp_path, options):
    write_files(tmp_path / "run" / "step1", checkpoint_files(1, as_bin=True))
    write_files(tmp_path / "run" / "step2", checkpoint_files(2, shards=True))
    options |= {"token_tables": True, "dtype": "bfloat16", "jackknife": 2}
    for name, device_map in {"whole": None, "auto": "auto"}.items():
        out = tmp_path / name
        assert (
            sweep(str(tmp_path / "run"), **{**options, "out": str(out)}, device_map=device_map) == 0
        )
        require_same(out, tmp_path / "whole")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--device-map", "gpus"], "must be auto, or a mapping of modules to devices; got 'gpus'"),
        (
            ["--device-map", '{"": "cpu", "layers.9": "disk"}'],
            "modules of GPTNeoXForCausalLM, such as '(lm_head|embed_out)'; got layers.9",
        ),
        (
            ["--device-map", '{"gpt_neox": "cpu"}'],
            "each weight a device; (lm_head|embed_out) has none",
        ),
        (
            ["--device-map", '{"": "cuda:99"}'],
            "must name devices of this machine, or disk; got 'cuda:99'",
        ),
        (["--device-map", "auto", "--device", "cpu"], "left out with a device, here cpu"),
        (["--device-map", "auto", "--model-class", "a.B"], "left out with a model_class, here a.B"),
    ],
)
def test_nonsense_is_refused_in_one_line(tmp_path, options, capsys, arguments, why):
    local_run(tmp_path / "run", steps=(1,))
    given = [
        part
        for name, value in options.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    capsys.readouterr()  # the bar with which transformers writes the model
    assert cli.main(["sweep", "--model", str(tmp_path / "run"), *given, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("embedgeo: error: device_map ")
    assert re.search(why, line)
    assert not Path(options["out"]).exists()
