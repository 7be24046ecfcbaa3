"""Earlier runs behind the curves of a report."""

import json

import numpy as np
import pytest

from embedgeo.cli import main
from embedgeo.report.reference import before_band, require_like
from embedgeo.report.runs import read_runs
from embedgeo.results.folder import SweepFolder
from tests.report.synthetic import make_sweep

STEPS = (0, 1, 8, 64, 512)
MEAN = "mean over blocks"


def scaled(folder, factor, steps=STEPS, **options):
    """A sweep whose values are those of every other one, times a factor."""
    sweep = SweepFolder(make_sweep(folder, steps, metrics=("n", "Q", "anisotropy"), **options))
    for name in sweep.done():
        records = sweep.read(name)
        value = records["value"].where(records["metric"] == "n", factor * records["value"])
        sweep.write(name, records.assign(value=value))
    return folder


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return scaled(tmp_path_factory.mktemp("reference") / "own", 1.0)


def behind(folder, *references):
    """The run in a folder, and earlier ones that it can be compared with."""
    runs = read_runs([folder])
    earlier = read_runs(references)
    require_like(earlier, runs)
    return runs[0], earlier


def block_mean(run, metric):
    return run.means(metric)[MEAN]


def band(data):
    return data.numbers["earlier runs, lowest"], data.numbers["earlier runs, highest"]


def test_the_band_is_the_range_of_the_means_over_blocks(own, tmp_path):
    folders = [scaled(tmp_path / f"seed{i}", factor) for i, factor in enumerate((0.8, 5.0, 0.9))]
    run, earlier = behind(own, *folders)
    (data,) = before_band(run, "anisotropy", earlier)
    mean, (low, high) = block_mean(run, "anisotropy"), band(data)
    np.testing.assert_allclose(low, 0.8 * mean)
    np.testing.assert_allclose(high, 5.0 * mean)
    assert "3 earlier (seed0, seed1, seed2), mean over blocks, at equal steps" in data.text
    assert "within it at 5 of 5 steps" in data.text
    assert data.figure.axes[0].get_ylim()[1] >= high.max()


def test_an_earlier_run_is_on_the_line_between_its_steps_and_nowhere_beyond_them(own, tmp_path):
    run, earlier = behind(own, scaled(tmp_path / "earlier", 1.0, (1, 64)))
    (data,) = before_band(run, "Q", earlier)
    ends = block_mean(earlier[0], "Q").tolist()
    at_8 = np.interp(np.log(9), [np.log(2), np.log(65)], ends)
    expected = [np.nan, ends[0], at_8, ends[1], np.nan]
    low, high = band(data)
    assert low.to_list() == pytest.approx(expected, nan_ok=True)
    assert high.equals(low)
    assert "within it at 0 of 3 steps" in data.text
    run, earlier = behind(own, tmp_path / "earlier", scaled(tmp_path / "longer", 2.0))
    (data,) = before_band(run, "Q", earlier)
    for end, at_64 in zip(band(data), (ends[1], 2 * block_mean(run, "Q")[64]), strict=True):
        assert end.isna().tolist() == [True, False, False, False, True]  # where both have values
        assert end[64] == pytest.approx(at_64)


def test_other_settings_are_refused(tmp_path):
    asked = {"text_sha256": "a" * 64, "rows": "tokens", "seq_len": 128, "num_tokens": 4096}
    asked["layers"] = "blocks"
    for name, other in (
        ("own", {}),
        ("alike", {}),
        ("unlike", {"text_sha256": "b" * 64, "seq_len": 64, "layers": "block.02"}),
    ):
        path = scaled(tmp_path / name, 1.0, (0, 8)) / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"asked": asked | other}))
    assert behind(tmp_path / "own", tmp_path / "alike")
    said = "text b{8} in place of a{8}; sequence length 64 in place of 128; layers block.02 in"
    with pytest.raises(ValueError, match=said):
        behind(tmp_path / "own", tmp_path / "unlike")


def test_other_numbers_of_rows_and_final_models_are_refused(own, tmp_path, capsys):
    few = scaled(tmp_path / "few", 1.0, n=10_000.0)
    assert main(["report", str(own), "--reference", str(few)]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.endswith("few is not like own: number of rows 10,000 in place of 65,536.")
    assert not (own / "report").exists()
    with pytest.raises(ValueError, match="measured at several steps; one is not"):
        behind(own, scaled(tmp_path / "one", 1.0, (8,)))


def test_the_page_has_the_band_of_the_others(own, tmp_path, unpainted):
    earlier = scaled(tmp_path / "old", 3)
    out = tmp_path / "out"
    given = str(own), "--out", str(out), "--reference", str(own), str(earlier)
    assert main(["report", *given]) == 0
    page = (out / "index.html").read_text()
    assert "1 earlier (old), mean over blocks, at equal steps" in page
