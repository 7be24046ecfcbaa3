"""The report of final models: no steps, compared over depth; groups, words and batches."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from embedgeo.cli import main
from embedgeo.drawing import style
from embedgeo.report import comparison
from embedgeo.report.runs import read_runs
from embedgeo.results.folder import SweepFolder
from tests.report.page import Page, report
from tests.report.synthetic import OF_TYPES, make_models, make_sweep
from tests.unpainted import unpainted

THREE = {"lab/bert-s": 2, "lab/bert-l": 4, "co/gpt": 2}
SHORT = ["bert-l", "bert-s", "gpt"]


def table(page: Page, after: str) -> pd.DataFrame:
    """The table of a page with a word in its head, by its first column."""
    for found in re.findall("<table.*?</table>", page.html, re.DOTALL):
        rows = re.findall("<tr>(.*?)</tr>", found, re.DOTALL)
        head, *body = [re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
        if after in head:
            cells = [[re.sub("<[^>]*>", "", cell) for cell in row] for row in body]
            return pd.DataFrame(cells).set_index(0).set_axis(head[1:], axis=1)
    raise AssertionError(after)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Page:
    metrics = ("n", "Q", "M", "V", "token_types", *OF_TYPES)
    folder = make_models(tmp_path_factory.mktemp("models") / "three", THREE, metrics=metrics)
    groups = ["encoder=bert-s,lab/bert-l", "decoder=gpt"]
    with unpainted():
        assert main(["report", str(folder), "--model-group", *groups]) == 0
    return Page(folder / "report" / "index.html")


def test_final_models_have_no_steps_and_are_compared_over_depth(three: Page) -> None:
    alts = " ".join(image["alt"] or "" for image in three.all("img"))
    assert not re.search(r"\bsteps?\b", three.text + alts, re.IGNORECASE)
    assert not [name for name in three.figures if re.search("dynamics|heatmap|loss", name)]
    assert {"Q-compared-profiles", "Q_t_cv-compared-profiles"} <= three.figures
    found = three.numbers("Q-compared-profiles")
    assert sorted(found["run"].unique()) == SHORT
    assert found.groupby("run")["depth"].agg(list)["bert-s"] == [0, 0.5, 1]
    for path in (three.folder / "figures").glob("*.[sc][vs][gv]"):
        assert not re.search(r"\bstep\b", path.read_text()), path


def test_a_table_names_layers_width_parameters_token_types_rows_and_group(
    three: Page, plain: Path
) -> None:
    assert table(three, "model").loc["gpt", "model"] == "co/gpt"
    sizes = table(three, "token types")
    assert list(sizes) == ["group", "layers", "width", "parameters", "token types", "rows each"]
    expected = ["decoder", "4: embed to final_norm", "64", "3,000,000", "3,000", "65,536"]
    assert sizes.loc["gpt"].tolist() == expected
    (unknown,) = table(report(plain), "parameters").to_dict("records")
    assert unknown["parameters"] == unknown["token types"] == "–"
    assert "group" not in unknown
    assert unknown["steps"] == "0 to 8"


def test_groups_share_their_dashes_and_the_legend_names_them(tmp_path: Path) -> None:
    metrics = ("n", "Q", *OF_TYPES)
    folder = make_models(tmp_path, THREE, metrics=metrics, groups={"co/gpt": "old"})
    assert {run.label: run.group for run in read_runs([folder])} == {
        **dict.fromkeys(SHORT, ""),
        "gpt": "old",
    }
    runs = read_runs([folder], {"lab/*": "encoder"})
    assert {run.label: run.group for run in runs} == {
        **dict.fromkeys(SHORT, "encoder"),
        "gpt": "old",
    }
    with style():
        data = comparison.compare_profiles(runs, "Q")
    assert "old: gpt" in data.text
    (legend,) = data.figure.legends
    names = [text.get_text().strip() for text in legend.texts]
    assert {*names} == {*SHORT, "encoder", "old"}
    dashes = {run.group: set() for run in runs}
    lines = [line for line in data.figure.axes[0].lines if line.get_marker() not in ("", "None")]
    assert len({str(line.get_color()) for line in lines}) == len(runs)
    for run, line in zip(runs, lines, strict=True):
        dashes[run.group].add(line.is_dashed())
    assert sorted(map(len, dashes.values())) == [1, 1]
    assert dashes["old"] != dashes["encoder"]


def test_a_final_model_is_no_point_of_a_run(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "mix", (4, 8, 64), 2, metrics=("n", "M"))
    make_models(folder, {"one/bert": 2, "two/bert": 3, "two/gpt": 1}, metrics=("n", "M"))
    steps = {run.label: run.steps if run.has_steps else None for run in read_runs([folder])}
    finals = dict.fromkeys(["one/bert", "two/bert", "gpt"])  # whole names where short ones agree
    assert steps == {**finals, "mix: step": [4, 8, 64]}
    page = report(folder)
    assert not [name for name in page.figures if "compared-dynamics" in name]  # of one run
    assert page.numbers("M-compared-profiles")["run"].nunique() == 4
    assert "step 64" in page.text
    assert "step 0" not in page.text


def test_a_copy_of_another_final_model_is_flagged_without_a_step(tmp_path: Path) -> None:
    folder = make_models(tmp_path / "a", {"lab/a": 1, "lab/b": 1}, metrics=("n", "M"))
    sweep = SweepFolder(folder)
    name, weights = "lab--b--main", sweep.read("lab--a--main")["weights_sha256"].iloc[0]
    copy = sweep.read(name).assign(duplicate_of="lab--a--main", weights_sha256=weights)
    sweep.write(name, copy, {}, sweep.facts(name))
    page = report(folder)
    assert "The model has the weights of another one." in page.text
    assert "step" not in page.text


def test_words_are_coloured_by_their_number_of_tokens(tmp_path: Path) -> None:
    folder = make_models(tmp_path / "a", {"lab/bert": 2}, metrics=("n", "M", "V"), tokens=True)
    (path,) = (folder / "tokens").iterdir()
    types = pd.read_parquet(path)
    types.drop(columns="num_tokens", errors="ignore").to_parquet(path)  # as an older sweep wrote it
    page = report(folder)
    assert {"M-profile", "decomposition", "tokens-V-against-M"} <= page.figures
    assert not [name for name in page.figures if name.startswith("words")]
    assert "Geometry of the embeddings: bert" in page.text
    assert not re.search(r"\bstep", page.text)
    types.assign(num_tokens=1 + types["token_id"] % 5 * 1.2).to_parquet(path)
    page = report(folder)
    assert {"words-embed", "words-block.00", "words-block.01"} <= page.figures
    numbers = page.numbers("words-block.01")
    at = types[types["layer"] == "block.01"].set_index("token_id")
    assert list(numbers) == ["token_id", "n", "Q", "M", "V", "num_tokens", "log10 n"]
    np.testing.assert_allclose(numbers["Q"], at["Q"][numbers["token_id"]])
    assert "at |T_w| ≥ 4 (160 words)" in page.text
