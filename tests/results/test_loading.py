"""`load_results`: one table of always the same columns, whatever has measured."""

from pathlib import Path

import pandas as pd
import pytest

from embedgeo import load_results
from embedgeo.report.runs import read_runs, runs_of_records
from embedgeo.results.folder import SweepFolder
from embedgeo.results.parquet import HistoryFile, to_records
from embedgeo.results.records import Record, block_means
from tests.records import layer_records
from tests.report.synthetic import make_sweep

COLUMNS = {
    **dict.fromkeys(("run", "model", "revision"), "str"),
    "step": "int64",
    **dict.fromkeys(("commit", "series", "weights_sha256", "duplicate_of", "layer"), "str"),
    **dict.fromkeys(("layer_index", "width"), "int64"),
    "metric": "str",
    **dict.fromkeys(("value", "stderr"), "float64"),
}


def step_records(sweep):
    folder = SweepFolder(sweep)
    return [
        Record(step=int(frame["step"].iloc[0]), **record)
        for name in sorted(folder.done())
        for frame in [folder.read(name)]
        for own in [to_records(frame)]
        for record in (*own, *block_means(own))
    ]


def swept(folder):
    metrics = ("n", "M", "V", "V_W_unbiased")
    return make_sweep(folder, (8, 0, 1), 2, duplicates={1: 0}, metrics=metrics, stderr=0.1)


def monitored(folder):
    records = step_records(swept(folder / "aside"))
    for inside, prefix in (("a", "geometry"), ("a", "probe"), ("b", "geometry")):
        file = HistoryFile(folder / "runs" / inside, prefix)
        file.add(records)
        file.close()
    return folder / "runs"


KINDS = {"sweep": swept, "histories": monitored}


@pytest.mark.parametrize("kind", KINDS)
def test_the_columns_and_their_types_are_always_the_same_and_nothing_is_missing(tmp_path, kind):
    table = load_results(str(KINDS[kind](tmp_path)))
    assert list(table) == list(COLUMNS)
    for name, dtype in COLUMNS.items():
        assert table[name].dtype == (dtype if dtype != "str" else pd.Series(["a"]).dtype), name
    assert table.drop(columns="stderr").notna().all().all()
    order = ["run", "step", "layer_index", "layer", "metric"]
    assert table.equals(table.sort_values(order, ignore_index=True))
    names = {"sweep": ["tiny"], "histories": ["a", "a probe", "b"]}
    assert table["run"].unique().tolist() == names[kind]
    assert set(table["model"]) == {"lab/tiny" if kind == "sweep" else ""}
    sweep = SweepFolder(tmp_path / "aside" if kind != "sweep" else tmp_path)
    at = ["step", "layer", "metric"]
    files = pd.concat([sweep.read(f"step{step}") for step in (0, 1, 8)]).set_index(at).sort_index()
    for _, run in table[table["layer"] != "mean"].groupby("run"):
        of_run = run.set_index(at).sort_index()
        columns = ["value", "width"]
        pd.testing.assert_frame_equal(of_run[columns], files[columns], rtol=1e-6)
    means = table[table["layer"] == "mean"].set_index(["run", "step", "metric"])
    blocks = table[table["layer"].str.startswith("block.")]
    expected = blocks.groupby(["run", "step", "metric"])["value"].mean()
    pd.testing.assert_series_equal(means["value"].sort_index(), expected)
    assert [run.layers for run in runs_of_records(table)] == [
        ["embed", "block.00", "block.01", "final_norm"]
    ] * len(names[kind])


def test_copies_and_numbers_of_the_whole_model_are_marked_as_such(tmp_path):
    table = load_results(swept(tmp_path))
    assert table.groupby("step")["duplicate_of"].first().tolist() == ["", "step0", ""]
    assert table[table["layer"] == "model"]["layer_index"].tolist() == [-1, -1, -1]


def test_a_copy_of_a_checkpoints_records_is_not_read_beside_them(tmp_path):
    whole = load_results(swept(tmp_path))
    file = tmp_path / "checkpoints" / "step1.parquet"
    file.with_stem("step1 (1)").write_bytes(file.read_bytes())
    assert load_results(tmp_path).equals(whole)


def test_what_a_listener_has_told_is_read_as_it_was_told(tmp_path):
    told = [("block.01", 2, "alarm_M", 8.0), ("mean", -1, "alarm_M", 20.0), ("mean", -1, "x", 9.0)]
    records = [
        {"step": 5, "layer": layer, "layer_index": i, "width": 8, "metric": key, "value": value}
        for layer, i, key, value in told
    ]
    file = HistoryFile(tmp_path)
    file.add(records)  # without a standard error
    file.close()
    table = load_results(tmp_path)
    found = table.set_index(["layer", "metric"])["value"].to_dict()
    assert found == {("block.01", "alarm_M"): 8.0, ("mean", "alarm_M"): 20.0, ("mean", "x"): 9.0}


def test_the_folder_of_wandbs_files_has_the_name_of_the_run_around_it(tmp_path):
    for run in ("run-1", "run-2"):
        file = HistoryFile(tmp_path / "wandb" / run / "files")
        file.add(layer_records(0, layers="a"))
        file.close()
    folder = tmp_path / "wandb"
    assert load_results(folder)["run"].unique().tolist() == ["run-1", "run-2"]
    assert load_results(folder / "run-2" / "files")["run"].tolist() == ["run-2"]


def test_a_folder_has_one_name_from_wherever_it_is_read(tmp_path, monkeypatch):
    folder = monitored(tmp_path)
    monkeypatch.chdir(folder / "b")
    for source in (folder / "b", folder / "b" / "history.parquet", ".", f"{folder}/b/../b/"):
        assert load_results(source)["run"].unique().tolist() == ["b"]
        assert [run.label for run in read_runs([Path(source)])] == ["b"]
    for source in (folder, folder / "a"):
        assert {"a", "a probe"} <= {*load_results(source)["run"]}
        assert [run.label for run in read_runs([source])] == sorted({*load_results(source)["run"]})
    (folder / "c").mkdir()
    # of two folders of one name, as much of the path as tells them apart
    (folder / "b").rename(folder / "c" / "a")
    assert load_results(folder)["run"].unique().tolist() == ["c/a", "runs/a", "runs/a probe"]


def test_linked_folders_are_read_once(tmp_path):
    (folder := monitored(tmp_path)).joinpath("latest").symlink_to("b")
    (folder / "a").rename(tmp_path / "a")
    (folder / "linked").symlink_to(tmp_path / "a")
    assert {*load_results(folder)["run"]} == {"a", "a probe", "b"}


def test_a_history_beside_a_sweep_is_left_out_by_name(tmp_path):
    (swept(tmp_path) / "history.parquet").touch()
    with pytest.warns(UserWarning, match=r"both, and history\.parquet is not read\. Give"):
        load_results(tmp_path)


def test_where_there_is_nothing_or_what_is_there_is_damaged_that_is_said(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"results must be in folders of runs; .*x is none\."
    ):
        load_results(tmp_path / "x")
    (tmp_path / "x" / "checkpoints").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "x"):
        with pytest.raises(ValueError, match=r"^.* holds no measurements of these kinds\.$"):
            load_results(folder)
    damaged = swept(tmp_path / "z") / "checkpoints" / "step0.parquet"
    damaged.write_bytes(b"")
    with pytest.raises(ValueError, match=r"step0\.parquet must be a Parquet file"):
        load_results(tmp_path / "z")
