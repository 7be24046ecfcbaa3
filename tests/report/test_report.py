"""The command `embedgeo report`: one page, its figures and their numbers."""

import re
from errno import ENOSPC
from math import nan
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest

from embedgeo.cli import main
from embedgeo.formatting import number
from embedgeo.report.comparison import compare_dynamics
from embedgeo.report.runs import read_runs, runs_of_records
from embedgeo.report.summary import flags, overview
from embedgeo.results.records import model_record
from tests.files import contents
from tests.records import layer_records
from tests.report.page import report
from tests.report.synthetic import EVERYTHING, layer_names, make_sweep

KINDS = ("dynamics", "profile", "heatmap")
GOLDEN = Path(__file__).with_name("page.txt")
"""The names of the figures of the page, and its words before how to read it, a line a tag. It is
what `golden` returns.
"""


def golden(page):
    lines = [line for line in page.lines if line not in ("PNG", "·", "SVG", "numbers (CSV)")]
    words, *_ = "\n".join([*sorted(page.figures), "", *lines]).rpartition("\nHow to read it")
    words = re.sub(r"\d{4}-\d\d-\d\d", "DATE", words)
    return re.sub(r"embedgeo [\d.]+\S*, torch \S+", "VERSIONS", words) + "\n"


def test_the_page_of_a_sweep_says_and_draws_what_it_did(page):
    assert golden(page) == GOLDEN.read_text()
    files = {path.name for path in (page.folder / "figures").iterdir()}
    assert files == {f"{name}.{end}" for name in page.figures for end in ("png", "svg", "csv")}
    assert len(page.all("img")) == len(page.figures)


def test_numbers_are_those_of_the_records(sweep, page):
    records = pd.concat(pd.read_parquet(path) for path in (sweep / "checkpoints").glob("*.parquet"))
    by_metric = records.set_index(["metric", "step", "layer"])["value"]
    blocks = [f"block.0{i}" for i in range(3)]
    expected = by_metric["M"].unstack("layer")
    dynamics = page.numbers("M-dynamics", "step")
    pd.testing.assert_frame_equal(dynamics[expected.columns], expected, check_names=False)
    np.testing.assert_allclose(dynamics["mean over blocks"], expected[blocks].mean(axis=1))
    profile = page.numbers("M-profile", "layer")
    np.testing.assert_allclose(profile["4000"], expected.loc[4000, profile.index], rtol=1e-14)
    everything = pd.read_csv(page.folder / "metrics.csv")
    columns = ["run", "step", "layer", "metric", "value", "stderr", "gaussian"]
    assert list(everything) == columns
    means = everything[everything["layer"] == "mean"].set_index(["metric", "step"])["value"]
    np.testing.assert_allclose(means["M"], expected[blocks].mean(axis=1))
    assert len(everything) - len(means) == records["value"].notna().sum()
    assert set(everything["metric"]) == {*EVERYTHING, "loss"}
    of_layers = everything[~everything["layer"].isin(["model", "mean"])]
    np.testing.assert_allclose(of_layers["stderr"], 0.05 * of_layers["value"].abs())
    at = of_layers.set_index(["step", "layer", "metric"]).loc[(64, "block.00")]
    assert at.loc["M", "value"] == pytest.approx(expected.loc[64, "block.00"], rel=1e-14)
    assert at.loc["M", "gaussian"] == pytest.approx(at.loc["Q", "value"] / 65_536)


def test_the_page_needs_no_network_and_its_links_lead_somewhere(page):
    assert len(page.html) < 5_000_000
    assert page.all("script") == [{"type": "application/json", "id": "plots"}, {}]
    outside, _, scripts = page.html.partition("<script")
    assert "http" not in re.sub(r'src="data:[^"]*"', "", outside)
    # who wrote it, in a comment
    assert re.findall(r"https?://[^ ]*", scripts) == ["https://github.com/leeoniya/uPlot"]
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert {"at-20a-20glance", "metric-M_over_Q", "metric-a-7Eb-20c"} <= ids
    for link in page.all("a"):
        target = link["href"]
        assert (page.folder / target).exists() or target[1:] in ids, target
    assert "`" not in page.html.partition("<script")[0]


def test_several_runs_are_compared_side_by_side(tmp_path):
    metrics = ("n", "M_over_Q")
    one = make_sweep(tmp_path / "x" / "same", num_blocks=2, metrics=metrics)
    two = make_sweep(tmp_path / "y" / "same", num_blocks=5, metrics=metrics, steps=(0, 4000))
    page = report(one, two, out=tmp_path / "out")
    assert "same (1)" in page.text
    assert "same (2)" in page.text
    assert {"same-1-M_over_Q-dynamics", "M_over_Q-compared-profiles"} <= page.figures


def test_a_layer_called_model_is_a_layer():
    records = [*layer_records(0, layers=("model", "block.00")), model_record("loss", 3.0)]
    (run,) = runs_of_records(pd.DataFrame(records).fillna({"step": 0}))
    assert run.table("V").to_dict("list") == {"model": [1.0], "block.00": [1.0]}
    assert run.model.to_dict("list") == {"loss": [3.0]}


def test_what_the_overview_calls_first_and_last_is_of_these_steps_or_has_its_own(tmp_path):
    changes = {(step, "block.00", "Q"): nan for step in (0, 128)}
    make_sweep(tmp_path, (0, 8, 64, 128), 1, metrics=("M", "Q"), changes=changes)
    (run,) = read_runs([tmp_path])
    every = pd.concat(overview([run]))
    cells = {column[-1]: every.loc["Q", column] for column in every}
    q = run.means("Q").iloc[:, 0]
    assert cells["first"] == f"{number(q[8])} (step 8)"
    assert cells["last"] == f"{number(q[64])} (step 64)"
    assert not every.loc["M"].str.contains("step").any()


def test_a_curve_that_is_undefined_at_its_end_has_no_last_value(tmp_path):
    for name, changes in (("a", {}), ("b", {(8, "block.00", "Q"): nan})):
        make_sweep(tmp_path / name, (0, 8), 1, metrics=("M", "Q"), changes=changes)
    runs = read_runs([tmp_path / "a", tmp_path / "b"])
    last = f"{number(runs[0].means('Q').iloc[-1, 0])} (a)"
    assert compare_dynamics(runs, "Q").text == f"Last values: from {last} to {last}."


def raised(folder):
    """The flags of a run and their cases."""
    (run,) = read_runs([folder])
    return {flag.title: flag.details for flag in flags(run)}


def test_rows_are_few_beside_those_of_other_steps_on_the_same_side(tmp_path):
    changes = {
        (step, f"{side}.{layer}", "n"): n
        for side, rows in {"encoder": (256, 256, 64, 256), "decoder": (32, 8, 32, 32)}.items()
        for step, n in zip((0, 8, 64, 128), rows, strict=True)
        for layer in layer_names(2)
    }
    sides = ("encoder.", "decoder.")
    make_sweep(tmp_path, (0, 8, 64, 128), 2, metrics=("n", "Q"), sides=sides, changes=changes)
    assert raised(tmp_path)["Steps of few rows"] == [
        "step 64 (encoder mean): 64 rows, not 256",
        "step 8 (decoder mean): 8 rows, not 32",
    ]


def test_numbers_that_break_off_are_a_flag_and_those_that_were_never_there_are_none(
    tmp_path,
):
    changes = {(step, "embed", "V_on_M_r2"): np.nan for step in (0, 8, 64)}
    changes |= {(0, layer, "cka_to_previous"): np.nan for layer in layer_names(2)}
    changes |= {(64, "block.00", "V_on_M_r2"): np.nan, (8, "embed", "my_metric"): np.nan}
    metrics = ("n", "V_on_M_r2", "cka_to_previous", "my_metric")
    make_sweep(tmp_path, (0, 8, 64), 2, metrics=metrics, changes=changes)
    missing = ["R² of V on M: block.00, step 64", "my_metric: embed, step 8"]
    assert raised(tmp_path)["Missing numbers"] == missing


def test_flags_are_in_order_of_what_they_mean_and_name_what_lacks_rows(tmp_path):
    changes = {(0, layer, "n"): 3000 for layer in layer_names(2)}
    changes |= {(8, layer, "n"): 9000 for layer in layer_names(2)}
    changes |= {(0, "block.01", "n"): 1500, (8, "embed", "n_nonfinite"): 1.0}
    metrics = ("n", "n_nonfinite", "V_W_over_V_unbiased", "mean_cosine", "anisotropy")
    make_sweep(tmp_path, (0, 8), 2, metrics=metrics, changes=changes)
    (run,) = read_runs([tmp_path])
    levels = [flag.level for flag in flags(run)]
    assert levels == sorted(levels, key=["broken", "care", "note"].index)
    assert {"broken", "care"} <= {*levels}
    assert raised(tmp_path)["Few rows"] == [
        "embed, block.00, final_norm: 3,000 rows, too few for V_W / V (4,096)",
        "block.01: 1,500 rows, too few for V_W / V (4,096), mean cosine (2,048)",
    ]


def test_a_layer_that_is_gone_is_a_flag_that_the_run_is_broken(tmp_path):
    changes = dict.fromkeys([(64, "block.01", "n"), (64, "block.01", "Q")], np.nan)
    make_sweep(tmp_path, (0, 8, 64), 2, metrics=("n", "Q"), changes=changes)
    (run,) = read_runs([tmp_path])
    gone = {flag.title: flag.level for flag in flags(run) if "block.01" in str(flag.details)}
    assert gone == {"Missing layers": "broken", "Missing numbers": "note"}


def test_a_dimension_that_no_surface_has_is_a_flag(tmp_path):
    dimensions = {"embed": 0.34, "block.00": 1.1}
    changes = {(8, layer, "intrinsic_dimension"): d for layer, d in dimensions.items()}
    make_sweep(tmp_path, (0, 8), 2, metrics=["intrinsic_dimension"], changes=changes)
    assert raised(tmp_path)["Near copies in the intrinsic dimension"] == ["embed: 0.34 at step 8"]


def test_whatever_ends_it_the_earlier_report_stays(plain, tmp_path):
    out = tmp_path / "out"
    other = make_sweep(tmp_path / "other", (0, 8), 2, metrics=["Q"])

    def fails(fault, words):
        broken = mock.patch("pandas.DataFrame.to_csv", side_effect=fault)
        with broken, pytest.raises(type(fault), match=words):
            report(plain, out=out)

    report(plain, out=out)
    figures = out / "figures"
    (figures / "empty").mkdir()
    (figures / "away").symlink_to("nowhere")
    (figures / "mine.png").touch()
    before = contents(tmp_path)
    fails(KeyboardInterrupt(), "^$")
    fails(OSError(ENOSPC, "No space left on device"), r"is not \(No space left on device\)")
    assert contents(tmp_path) == before
    report(other, out=out)
    others = {path.name for path in figures.glob("[!Ql]*")}  # than those of Q and the loss
    assert others == {"away", "empty", "mine.png"}


def test_what_has_been_changed_in_a_report_is_not_replaced(plain, tmp_path):
    out = tmp_path / "out"
    other = make_sweep(tmp_path / "other", (0, 8), 2, metrics=["V"])
    report(plain, out=out)
    written = (out / "index.html").read_bytes()
    for name, own in {"index.html": written + b"mine", "figures/V-dynamics.png": b"mine"}.items():
        (out / name).write_bytes(own)
        before = contents(out)
        with pytest.raises(FileExistsError, match=rf"it did not write {name}, or not as it is now"):
            report(other, out=out)
        assert contents(out) == before
        (out / "index.html").write_bytes(written)
    (out / "figures").rename(tmp_path / "figures")  # as to another disk
    (out / "figures").symlink_to(tmp_path / "figures")
    with pytest.raises(FileExistsError, match="it did not write figures, or not as it is now"):
        report(plain, out=out)


def bad_input(tmp_path, plain):
    """Arguments of the command by what it says of them."""
    for name in ("columns", "empty", "other"):
        (tmp_path / name).mkdir()
    pd.DataFrame({"step": [1]}).to_parquet(tmp_path / "columns" / "history.parquet")
    (tmp_path / "other" / "mine.txt").touch()
    return {
        "folders of runs": [tmp_path / "nosuch"],
        "no measurements": [tmp_path / "empty"],
        "layer_index, width, metric, value, stderr, deviations missing": [tmp_path / "columns"],
        "holds something else": [plain, Path("--out"), tmp_path / "other"],
        "required": [],
        f"a report of several folders needs a folder of its own; got {plain}, {plain} without "
        "one. Give --out FOLDER.": [plain, plain],
    }


def test_bad_input_gives_one_line_and_status_2(plain, tmp_path, capsys):
    for words, arguments in bad_input(tmp_path, plain).items():
        before = sorted(tmp_path.rglob("*"))
        try:
            status = main(["report", *map(str, arguments)])
        except SystemExit as stopped:
            status = stopped.code
        captured = capsys.readouterr()
        assert (status, captured.out) == (2, "")
        (line,) = captured.err.splitlines()
        assert line.startswith("embedgeo: error: ")
        assert words in line
        assert sorted(tmp_path.rglob("*")) == before
