"""The report of final models: no steps, compared over depth; groups, words and batches."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from embedgeo.cli import main
from embedgeo.drawing import style
from embedgeo.report import comparison, figures, write_report
from embedgeo.report.runs import read_runs
from embedgeo.results.folder import SweepFolder
from tests.report.synthetic import OF_BATCHES, OF_TYPES, make_models, make_sweep

SIX = {
    "lab/bert-s": 2,
    "lab/bert-l": 4,
    "lab/roberta-s": 2,
    "lab/roberta-l": 4,
    "co/gpt-s": 2,
    "co/gpt-l": 4,
}
GROUPS = ["encoder=bert-s,lab/bert-l,roberta-s,roberta-l", "decoder=gpt-s,gpt-l"]
SOME = ("n", "Q", "M", "V", "token_types", *OF_TYPES)


def words(html: str) -> str:
    """What a page says, also in the texts of its pictures, on one line."""
    without = re.sub(r'src="data:[^"]*"|<(style|script)\b.*?</\1>', "", html, flags=re.DOTALL)
    alts = " ".join(re.findall(r'alt="([^"]*)"', without))
    return " ".join((alts + " " + re.sub(r"<[^>]+>", " ", without)).split())


def tables(page: Path) -> list[pd.DataFrame]:
    """The tables of a page, by the first column."""
    found = []
    for table in re.findall("<table.*?</table>", page.read_text(), re.DOTALL):
        rows = [
            re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row)
            for row in re.findall("<tr>(.*?)</tr>", table, re.DOTALL)
        ]
        head, *body = [[re.sub("<[^>]*>", "", cell) for cell in row] for row in rows]
        found.append(
            pd.DataFrame(body).set_index(0).set_axis(head[1:], axis=1)
            if len(head) == len(body[-1])
            else None
        )
    return found


def write_texts(figure: Figure, path: Path, **_: object) -> None:
    path.write_text("\n".join(text.get_text() for text in figure.findobj(Text)))


@pytest.fixture(scope="module", autouse=True)
def no_pictures() -> Iterator[None]:
    """Figures are made, but not painted, which takes most of the time; in place of an SVG there are
    its texts.
    """
    with (
        mock.patch("embedgeo.drawing.png", return_value=(b"a picture", 1, 1)),
        mock.patch.object(Figure, "savefig", write_texts),
    ):
        yield


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_models(tmp_path_factory.mktemp("models") / "six", SIX, metrics=SOME)
    assert main(["report", str(folder), "--model-group", *GROUPS]) == 0
    return folder / "report"


@pytest.mark.slow
def test_final_models_have_no_steps_and_are_compared_over_depth(six: Path) -> None:
    html = (six / "index.html").read_text()
    said = words(html)
    assert not re.search(r"\bsteps?\b", said, re.IGNORECASE)
    names = {path.stem for path in (six / "figures").glob("*.png")}
    assert not [name for name in names if re.search("dynamics|heatmap|loss", name)]
    assert {"Q-compared-profiles", "decomposition"} <= {
        re.sub("^(bert|roberta|gpt)-[sl]-", "", name) for name in names
    }
    found = pd.read_csv(six / "figures" / "Q-compared-profiles.csv")
    assert sorted(found["run"].unique()) == [
        "bert-l",
        "bert-s",
        "gpt-l",
        "gpt-s",
        "roberta-l",
        "roberta-s",
    ]
    assert found.groupby("run")["depth"].agg(list)["bert-s"] == [0, 0.5, 1]
    assert not [p for p in (six / "figures").glob("*.svg") if re.search(r"\bstep\b", p.read_text())]
    assert not [p for p in (six / "figures").glob("*.csv") if "step" in p.read_text()]
    records = pd.read_csv(six / "metrics.csv")
    assert list(records) == ["run", "step", "layer", "metric", "value", "stderr", "gaussian"]


def test_a_table_names_layers_width_parameters_token_types_rows_and_group(six: Path) -> None:
    origins, table, means = tables(six / "index.html")
    assert origins.loc["gpt-l", "model"] == "co/gpt-l"
    assert list(table) == ["group", "layers", "width", "parameters", "token types", "rows each"]
    expected = ["decoder", "6: embed to final_norm", "96", "6,000,000", "3,000", "65,536"]
    assert table.loc["gpt-l"].tolist() == expected
    assert list(means) == list(table.index)


def test_what_is_not_known_of_a_run_is_a_dash(tmp_path: Path) -> None:
    page = write_report([make_sweep(tmp_path / "a", (0, 1), 1, metrics=("M", "V"))])
    row = tables(page)[0].loc["a"]
    assert row[["parameters", "token types", "rows each"]].tolist() == ["–"] * 3
    assert "group" not in row  # there are none
    assert row["steps"] == "0 to 1"


@pytest.mark.slow
def test_groups_share_their_dashes_and_the_legend_names_them(tmp_path: Path) -> None:
    folder = make_models(
        tmp_path / "a",
        SIX,
        metrics=("n", "Q", *OF_TYPES),
        groups={"co/gpt-s": "old", "co/gpt-l": "old"},
    )
    told = read_runs([folder])
    assert {run.label: run.group for run in told if run.group} == {"gpt-s": "old", "gpt-l": "old"}
    runs = read_runs([folder], {"gpt-s": "decoder", "lab/*": "encoder"})
    groups = {"gpt-s": "decoder", "gpt-l": "old"}
    assert {run.label: run.group for run in runs} == {
        run.label: groups.get(run.label, "encoder") for run in runs
    }
    with style():
        for draw in (
            lambda: comparison.compare_profiles(runs, "Q"),
            lambda: comparison.compare_types(runs),
        ):
            data = draw()
            (legend,) = data.figure.legends
            looks = {
                text.get_text().strip(): line
                for text, line in zip(legend.texts, legend.get_lines(), strict=True)
            }
            assert {*looks} == {*(run.label for run in runs), "decoder", "old", "encoder"}
            for ax in data.figure.axes:
                lines = [line for line in ax.lines if line.get_marker() not in ("", "None")]
                assert len({str(line.get_color()) for line in lines}) == len(runs)
                for run, line in zip(runs, lines, strict=True):
                    assert line._unscaled_dash_pattern == looks[run.group]._unscaled_dash_pattern
            assert (
                len(
                    {
                        str(looks[group]._unscaled_dash_pattern)
                        for group in ("decoder", "old", "encoder")
                    }
                )
                == 3
            )
            assert "decoder: gpt-s; " in data.text


def test_without_groups_nothing_is_said_of_them(tmp_path: Path) -> None:
    runs = read_runs([make_models(tmp_path / "a", {"a": 1, "b": 2}, metrics=("n", "Q"))])
    with style():
        data = comparison.compare_profiles(runs, "Q")
    assert "group" not in data.text
    assert len(data.figure.legends[0].texts) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("encoder=nosuch", "model_group must name models that are there; nosuch is none of"),
        ("x", "as encoder=a,b"),
    ],
)
def test_groups_of_unknown_models_are_refused_in_one_line(
    given: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_models(tmp_path / "a", {"lab/a": 1, "lab/b": 1}, metrics=("n", "M"))
    assert main(["report", str(folder), "--model-group", given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (folder / "report").exists()


def test_groups_may_be_a_mapping_in_yaml(tmp_path: Path) -> None:
    folder = make_models(tmp_path / "a", {"lab/a": 1, "lab/b": 1}, metrics=("n", "M"))
    config = tmp_path / "report.yaml"
    config.write_text(f"dirs: [{folder}]\nmodel_group:\n  encoder: [a]\n  decoder: b\n")
    assert main(["report", "--config", str(config)]) == 0
    table = tables(folder / "report" / "index.html")[1]
    assert table["group"].to_dict() == {"a": "encoder", "b": "decoder"}


def test_one_figure_has_the_values_over_token_types_of_all_models(six: Path) -> None:
    found = pd.read_csv(six / "figures" / "token-types-compared.csv")
    assert list(found) == ["run", "depth", *OF_TYPES]
    assert found["run"].nunique() == 6
    said = words((six / "index.html").read_text())
    assert "what the norm of a token's mean gains, its variance loses" in said.replace("&#39;", "'")
    assert "Mean and variance over token types" in said


@pytest.mark.slow
def test_a_final_model_is_no_point_of_a_run(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "mix", (4, 8, 64), 2, metrics=("n", "M", "V"))
    make_models(folder, {"lab/final": 2, "lab/other": 3}, metrics=("n", "M", "V"))
    runs = {run.label: run for run in read_runs([folder])}
    assert {label: run.has_steps for label, run in runs.items()} == {
        "final": False,
        "other": False,
        "mix: step": True,
    }
    assert runs["mix: step"].steps == [4, 8, 64]
    page = write_report([folder])
    figures_ = folder / "report" / "figures"
    assert not list(figures_.glob("*compared-dynamics*"))  # of one run
    assert pd.read_csv(figures_ / "M-compared-profiles.csv")["run"].nunique() == 3
    said = words(page.read_text())
    assert "step 64" in said
    assert "step 0" not in said
    columns = re.findall('<th scope="col"[^>]*>(value|first|last)</th>', page.read_text())
    assert columns == ["value", "value", "first", "last"]


def test_models_of_one_short_name_have_their_whole_names(tmp_path: Path) -> None:
    folder = make_models(
        tmp_path / "a", {"one/bert": 1, "two/bert": 1, "two/gpt": 1}, metrics=("n", "M")
    )
    assert [run.label for run in read_runs([folder])] == ["one/bert", "two/bert", "gpt"]


@pytest.mark.slow
def test_one_final_model_is_drawn_over_its_layers(tmp_path: Path) -> None:
    folder = make_models(
        tmp_path / "bert", {"lab/bert": 1}, metrics=("n", "Q", "M", "V"), tokens=True
    )
    said = words(write_report([folder]).read_text())
    names = {path.stem for path in (folder / "report" / "figures").glob("*.png")}
    assert {"Q-profile", "decomposition", "tokens-statistics", "tokens-V-against-M"} <= names
    assert "words-embed" not in names
    assert not re.search(r"\bstep", said)
    assert "Geometry of the embeddings: bert" in said


def test_a_copy_of_another_final_model_is_flagged_without_a_step(tmp_path: Path) -> None:
    folder = make_models(tmp_path / "a", {"lab/a": 1, "lab/b": 1}, metrics=("n", "M"))
    sweep = SweepFolder(folder)
    name, weights = "lab--b--main", sweep.read("lab--a--main")["weights_sha256"].iloc[0]
    copy = sweep.read(name).assign(duplicate_of="lab--a--main", weights_sha256=weights)
    sweep.write(name, copy, {}, sweep.facts(name))
    said = words(write_report([folder]).read_text())
    assert "The model has the weights of another one." in said
    assert "step" not in said


def band_sizes(figure: object) -> list[float]:
    """Relative half-widths of the bands of the first axes, at their highest points."""
    found = []
    for band in figure.axes[0].collections:  # type: ignore[attr-defined]
        if isinstance(band, PolyCollection) and len(band.get_paths()):
            points = np.concatenate([path.vertices for path in band.get_paths()])
            ends = points[points[:, 0] == points[points[:, 1].argmax(), 0], 1]
            found.append((ends.max() - ends.min()) / (ends.max() + ends.min()))
    return found


@pytest.mark.slow
def test_bands_over_batches_are_not_taken_for_standard_errors(tmp_path: Path) -> None:
    folder = make_sweep(
        tmp_path / "a",
        (0, 8, 64),
        2,
        metrics=("n", "anisotropy", *OF_BATCHES, "intrinsic_dimension"),
    )
    sweep = SweepFolder(folder)
    for name in ("step0", "step8", "step64"):
        records = sweep.read(name)
        at = records.set_index(["layer", "metric"])["value"].to_dict()
        wanted = {
            "anisotropy_batch_mean": 1.0,
            "anisotropy_batch_std": 0.05,
            "intrinsic_dimension_std": 0.0,
        }
        values = [
            wanted[metric] * at[layer, "anisotropy"] if metric in wanted else value
            for layer, metric, value in zip(
                records["layer"], records["metric"], records["value"], strict=True
            )
        ]
        sweep.write(name, records.assign(value=values))
    (run,) = read_runs([folder])
    metric = "anisotropy_batch_mean"
    with style():
        drawn = [figures.dynamics(run, metric), figures.profile(run, metric)]
        drawn += [
            comparison.compare_dynamics([run], metric),
            comparison.compare_profiles([run], metric),
        ]
        for data in drawn:
            assert data.text.endswith("Bands: one standard deviation over batches to each side.")
            np.testing.assert_allclose(band_sizes(data.figure), 0.05)
            assert any(str(column).startswith("std of ") for column in data.numbers)
            assert not any(str(column).startswith("stderr") for column in data.numbers)
        known = replace(run, errors=0.2 * run.values)  # standard errors come first
        data = figures.profile(known, metric)
        assert data.text.endswith("Bands: one standard error to each side.")
        np.testing.assert_allclose(band_sizes(data.figure), 0.2)
    said = words(write_report([folder]).read_text())
    assert "One standard deviation over batches of rows" in said
    assert "standard error" not in said
    assert "±" not in said
    assert said.index("anisotropy of batches anisotropy_batch_mean") < said.index(
        "intrinsic dimension intrinsic_dimension "
    )


def test_one_batch_has_no_band(tmp_path: Path) -> None:
    folder = make_sweep(
        tmp_path / "a", (0, 8), 1, metrics=("n", "intrinsic_dimension", "intrinsic_dimension_std")
    )
    sweep = SweepFolder(folder)
    for name in ("step0", "step8"):
        records = sweep.read(name)
        sweep.write(
            name,
            records.assign(
                value=records["value"].where(records["metric"] != "intrinsic_dimension_std")
            ),
        )
    said = words(write_report([folder]).read_text())
    assert "standard deviation over" not in said
    assert "Bands" not in said


def test_standard_errors_and_spreads_are_not_mixed_in_one_picture(tmp_path: Path) -> None:
    runs = read_runs(
        [make_models(tmp_path / "a", {"a": 2, "b": 2}, metrics=("n", "anisotropy", *OF_BATCHES))]
    )
    one = replace(runs[0], errors=0.01 * runs[0].values)
    with style():
        data = comparison.compare_profiles([one, runs[1]], "anisotropy_batch_mean")
    np.testing.assert_allclose(band_sizes(data.figure), [0.01])
    assert "standard error" in data.text


@pytest.mark.slow
def test_words_are_coloured_by_their_number_of_tokens(tmp_path: Path) -> None:
    folder = make_models(tmp_path / "a", {"lab/bert": 2}, metrics=("n",), tokens=True)
    (path,) = (folder / "tokens").iterdir()
    table = pd.read_parquet(path)
    table.drop(columns="num_tokens", errors="ignore").to_parquet(path)  # as an older sweep wrote it
    assert "|T_w|" not in words(write_report([folder]).read_text())
    table.assign(num_tokens=1 + table["token_id"] % 5 * 1.2).to_parquet(path)
    said = words(write_report([folder]).read_text())
    assert "A word's row is the mean over its tokens, which has a smaller norm" in said.replace(
        "&#39;", "'"
    )
    assert {path.stem for path in (folder / "report" / "figures").glob("words-*.png")} == {
        "words-embed",
        "words-block.00",
        "words-block.01",
    }
    numbers = pd.read_csv(folder / "report" / "figures" / "words-block.01.csv")
    at = table[table["layer"] == "block.01"].set_index("token_id")
    assert list(numbers) == ["token_id", "n", "Q", "M", "V", "num_tokens", "log10 n"]
    np.testing.assert_allclose(numbers["Q"], at["Q"][numbers["token_id"]])
    assert "at |T_w| ≥ 4 (160 words)" in said
