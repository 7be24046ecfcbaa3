"""Earlier runs behind the curves of a report."""

import io

import numpy as np
import pandas as pd
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image

from embedgeo import GeometryMonitor
from embedgeo.cli import main
from embedgeo.report.figures import dynamics
from embedgeo.report.live import LivePictures
from embedgeo.report.reference import read_references, reference_band, with_references
from embedgeo.report.runs import read_runs
from embedgeo.results.folder import SweepFolder
from embedgeo.results.parquet import HistoryFile
from embedgeo.results.records import model_record
from tests.records import layer_records
from tests.report.synthetic import make_sweep
from tests.training.runs import fit

STEPS = (0, 1, 8, 64, 512)
SOME = ("n", "Q", "M_over_Q", "anisotropy")


def scaled(folder, factor, steps=STEPS, tokens_per_step=0, **options):
    """A sweep whose values are those of every other one, times a factor."""
    sweep = SweepFolder(make_sweep(folder, steps, metrics=SOME, **options))
    for name in sweep.done():
        records = sweep.read(name)
        value = records["value"].where(records["metric"] == "n", factor * records["value"])
        records = records.assign(value=value)
        if tokens_per_step:
            record = model_record("tokens_seen", float(tokens_per_step * records["step"].iloc[0]))
            records = pd.concat([records, records.iloc[:1].assign(**record)], ignore_index=True)
        sweep.write(name, records)
    return folder


def behind(runs, folders):
    return with_references(runs, read_references(folders))


def block_mean(run, metric, step):
    return np.mean(
        [run.values.loc[(step, layer), metric] for layer in run.layers if layer.startswith("block")]
    )


def test_the_band_is_the_range_of_the_means_over_blocks(tmp_path):
    folders = [scaled(tmp_path / f"seed{i}", factor) for i, factor in enumerate((0.8, 1.1, 0.9))]
    runs = behind(read_runs([scaled(tmp_path / "own", 1.0)]), folders)
    band = reference_band(runs[0], "anisotropy", "mean over blocks")
    for step in STEPS:
        own = block_mean(runs[0], "anisotropy", step)
        assert band.low[step] == pytest.approx(0.8 * own)
        assert band.high[step] == pytest.approx(1.1 * own)
    assert (band.runs, band.unit) == (["seed0", "seed1", "seed2"], "steps")
    assert "within it at 5 of 5 steps" in band.describe(
        runs[0].means(runs[0].table("anisotropy")).iloc[:, 0]
    )
    figure = dynamics(runs[0], "anisotropy")
    assert np.allclose(figure.numbers["reference high"], band.high)
    assert "3 earlier runs (seed0, seed1, seed2)" in figure.text


def test_an_earlier_run_is_on_the_line_between_its_steps_and_nowhere_beyond_them(tmp_path):
    earlier = scaled(tmp_path / "earlier", 1.0, (1, 64))
    runs = behind(read_runs([scaled(tmp_path / "own", 1.0)]), [earlier])
    (reference,) = runs[0].references
    band = reference_band(runs[0], "Q", "mean over blocks")
    ends = [block_mean(reference, "Q", step) for step in (1, 64)]
    at_8 = np.interp(np.log(9), [np.log(2), np.log(65)], ends)
    assert band.low.to_list() == pytest.approx(
        [np.nan, ends[0], at_8, ends[1], np.nan], nan_ok=True
    )
    assert band.high.equals(band.low)
    assert "within it at 2 of 3 steps" in band.describe(
        pd.Series([1.0, ends[0], 0.0, ends[1], 1.0], pd.Index(STEPS, name="step"))
    )


def test_runs_that_know_their_tokens_stand_at_equal_tokens(tmp_path):
    earlier = scaled(tmp_path / "earlier", 1.0, (0, 2, 16, 128, 1024), tokens_per_step=1000)
    own = scaled(tmp_path / "own", 1.0, tokens_per_step=2000)
    runs = behind(read_runs([own]), [earlier])
    (reference,) = runs[0].references
    band = reference_band(runs[0], "Q", "mean over blocks")
    assert band.unit == "tokens"
    for step in STEPS:
        assert band.low[step] == pytest.approx(block_mean(reference, "Q", 2 * step))
    without = behind(read_runs([scaled(tmp_path / "unknown", 1.0)]), [earlier])
    assert reference_band(without[0], "Q", "mean over blocks").unit == "steps"


def test_a_band_far_from_the_curves_is_in_the_picture(tmp_path):
    far = scaled(tmp_path / "far", 5.0)
    runs = behind(read_runs([scaled(tmp_path / "own", 1.0)]), [far])
    _, high = dynamics(runs[0], "anisotropy").figure.axes[0].get_ylim()
    assert high >= reference_band(runs[0], "anisotropy", "mean over blocks").high.max()


def test_what_was_not_measured_alike_is_refused_in_a_line(tmp_path, capsys):
    own, few = scaled(tmp_path / "own", 1.0), scaled(tmp_path / "few", 1.0, n=10_000.0)
    assert main(["report", str(own), "--reference", str(few)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("few is not like own: number of rows 10,000 in place of 65,536.")
    assert not (own / "report").exists()


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("text_sha256", "b" * 64, "text bbbbbbbb in place of aaaaaaaa"),
        ("rows", "mean", "rows mean in place of tokens"),
        ("unit", "line", "unit line in place of sequence"),
        ("seq_len", 64, "sequence length 64 in place of 128"),
        ("discard_fraction", 0.5, "discard fraction 0.5 in place of 0.1"),
    ],
)
def test_other_settings_are_refused(setting, value, said, tmp_path):
    settings = {
        "text_sha256": "a" * 64,
        "rows": "tokens",
        "unit": "sequence",
        "seq_len": 128,
        "num_tokens": 4096,
    }
    settings["discard_fraction"] = 0.1
    folders = []
    for name, asked in (("own", settings), ("other", settings | {setting: value})):
        folder = SweepFolder(scaled(tmp_path / name, 1.0))
        records = {each: folder.read(each) for each in folder.done()}
        for path in folder.checkpoints.glob("*.parquet"):
            path.unlink()
        for path in folder.path.glob("manifest.json"):
            path.unlink()
        made = SweepFolder(tmp_path / f"{name}-made")
        made.open(asked, {"text": {}})
        for each, frame in records.items():
            made.write(each, frame)
        folders.append(made.path)
    runs = read_runs(folders[:1])
    assert behind(runs, folders[:1])[0].references
    with pytest.raises(ValueError, match=said):
        behind(runs, folders[1:])


def test_a_final_model_is_no_reference(tmp_path):
    own, one = scaled(tmp_path / "own", 1.0), scaled(tmp_path / "one", 1.0, (8,))
    with pytest.raises(ValueError, match="measured at several steps; one is not"):
        behind(read_runs([own]), [one])


@pytest.mark.slow
def test_the_page_has_the_band_of_one_run_and_of_several(tmp_path, capsys):
    own, two, earlier = (
        scaled(tmp_path / name, 1 + i / 10) for i, name in enumerate(("own", "two", "earlier"))
    )
    for dirs in ([own], [own, two]):
        out = tmp_path / f"out{len(dirs)}"
        options = ["--metrics", "anisotropy", "--out", str(out), "--reference", str(earlier)]
        assert main(["report", *map(str, dirs), *options]) == 0
        assert (
            "earlier run (earlier), mean over blocks, at equal steps"
            in (out / "index.html").read_text()
        )


def history(factor=1.0, rows=1000.0):
    at = [(step, factor * (0.1 + step / 1000)) for step in STEPS]
    layers = ["embed", "block.00"]
    values = [
        record
        for step, value in at
        for record in layer_records(step, value, layers=layers, metrics=["M_over_Q"])
    ]
    return values + [
        record
        for step, _ in at
        for record in layer_records(step, rows, layers=layers, metrics=["n"])
    ]


def monitored(folder, **options):
    """The folder of a monitored run."""
    folder.mkdir()
    file = HistoryFile(folder)
    file.add(sorted(history(**options), key=lambda record: record["step"]))
    file.close()
    return folder


def test_live_curves_have_earlier_runs_behind_them(tmp_path):
    folders = [monitored(tmp_path / "low", factor=0.5), monitored(tmp_path / "high", factor=1.5)]
    tag = "geometry.curves/M_over_Q"
    pictures = [
        dict(LivePictures(reference=reference).draw(history(), is_due=True))[tag]
        for reference in ([], folders)
    ]
    shades = [
        np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).astype(int)
        for picture, *_ in pictures
    ]
    without, behind_them = (
        int(((shade > 205) & (shade < 222)).all(axis=2).sum()) for shade in shades
    )
    assert behind_them > 10 * without + 1000


def test_live_curves_refuse_other_rows(tmp_path):
    other = monitored(tmp_path / "other", rows=10.0)
    with pytest.raises(
        ValueError, match=r"other is not like this one: number of rows 10 in place of 1000\.$"
    ):
        next(LivePictures(reference=[other]).draw(history(), is_due=True))


def test_a_monitor_takes_folders_that_exist(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="reference must be folders of earlier runs; nowhere is none"
    ):
        GeometryMonitor(reference=["nowhere"])


@pytest.mark.slow
def test_a_monitor_warns_of_an_earlier_run_that_was_measured_otherwise(tmp_path):
    other = monitored(tmp_path / "other", rows=10.0)
    with pytest.warns(
        UserWarning, match="a reference must be measured like the runs before it; other is not like"
    ):
        fit(
            tmp_path,
            GeometryMonitor(every_n_steps=1, reference=[other]),
            logger=TensorBoardLogger(tmp_path),
            max_steps=2,
        )
