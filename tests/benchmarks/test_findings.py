"""The tables and figures of docs/findings.md can be made, and its verdicts are those of the
numbers.
"""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import findings
from benchmarks.findings import (
    CLAIMS,
    PAGE,
    Claim,
    bell,
    fall,
    peak,
    rise,
    second_fall,
    span,
    tau,
    with_tables,
)
from benchmarks.findings_runs import (
    KINDS,
    SIZES,
    Setting,
    Training,
    do_runs,
    measured_steps,
    read_runs,
    tasks,
)

PLACES = [
    *(
        "models",
        "claims",
        "neighbours",
        "beyond",
        "equal loss",
        "final loss",
        "alarms",
        "from the start",
    ),
    *(f"{name} {kind}" for kind in KINDS for name in ("sampling", "gaussian", "errors")),
]


def tables_of(page):
    return dict(re.findall(r"<!-- table: (.+?) -->\n(.*?)<!-- end -->", page, re.DOTALL))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder of the small runs, with the page and the figures that were made of them."""
    folder = tmp_path_factory.mktemp("findings") / "runs"
    findings.main("small", folder)
    return folder


@pytest.mark.slow
def test_every_table_and_figure_of_the_page_is_made(made):
    page = (made / "findings.md").read_text()
    found = tables_of(page)
    assert sorted(found) == sorted(PLACES)
    for name, table in found.items():
        rows = table.strip().splitlines()
        assert len({row.count(" | ") for row in (rows[0], *rows[2:])}) == 1, name
        assert "nan" not in table
        assert "inf" not in table
    verdicts = sum(
        found["claims"].count(f": {verdict} |") for verdict in ("holds", "fails", "open")
    )
    assert verdicts == sum(len(claim.kinds) for claim in CLAIMS)
    figures = re.findall(r"images/(findings-[\w-]+)\.png", page)
    names = {file.stem for file in (made / "images").glob("findings-*.png")}
    assert names == {name + shade for name in figures for shade in ("", "-dark")}


@pytest.mark.slow
def test_what_was_done_is_not_done_again_and_gives_the_same_tables(made, capsys):
    files = {file: file.stat().st_mtime_ns for file in made.glob("*.parquet")}
    assert len(files) == 2 * len(tasks(SIZES["small"]))
    lost = made / "post-LN-1.losses.parquet"
    before = lost.read_bytes()
    lost.unlink()
    shutil.copy(made / "findings.md", made.parent / "findings.md")
    findings.main("small", made, page=made.parent / "findings.md")
    assert "0 of 17 tables differ" in capsys.readouterr().out
    assert lost.read_bytes() == before
    again = {file for file, changed in files.items() if file.stat().st_mtime_ns != changed}
    assert again == {lost, made / "post-LN-1.values.parquet"}
    with pytest.raises(ValueError, match="has others"):
        do_runs("full", made, 1)


@pytest.mark.slow
def test_faults_begin_where_they_are_said_to(made):
    _, losses = read_runs(made, "small")
    losses = losses[losses["is_alarm"] & losses["loss"].notna() & (losses["seed"] == 200)]
    by_fault = losses.pivot(index="step", columns="fault", values="loss")
    start = int(losses["onset"].iloc[0])
    late = by_fault[
        ["noise for text", "labels shifted", "float16 underflow", "dead head", "rate jumps × 10"]
    ]
    assert late.loc[: start - 1].nunique(axis=1).eq(1).all()
    assert late.loc[start + 2 :].nunique(axis=1).gt(1).all()
    assert by_fault.loc[start, "noise for text"] > by_fault.loc[start, "dead head"] + 0.2
    assert by_fault["weights × 4"].first_valid_index() == 0
    assert (
        by_fault.loc[0, "weights × 4"]
        != by_fault.loc[0, "no warm-up"]
        == by_fault.loc[0, "dead head"]
    )


def test_shapes_are_told_by_their_size():
    assert peak(np.array([1.0, 3.0, 2.0])) == pytest.approx(0.5)
    assert peak(np.array([1.0, 1.5, 2.0])) == pytest.approx(-0.25)
    curve = np.array([4.0, 1.0, 3.0, 2.0])
    assert [shape(curve) for shape in (fall, rise, second_fall)] == pytest.approx(
        [0.75, 2.0, 1 / 3]
    )
    assert tau(np.array([1.0, 2.0, 4.0])) == 1
    assert bell(np.array([1.0, 2.0, 3.0, 2.0, 1.5])) == pytest.approx(1.0)
    assert bell(np.array([1.0, 2.0, 2.0, 4.0, 3.0, 2.0, 2.0, 2.0])) == pytest.approx(1.0)
    # not half way
    assert bell(np.array([1.0, 4.0, 3.0, 3.0, 3.0, 3.0, 1.0, 1.0])) == pytest.approx(-0.25)
    assert span(np.array([1.0, 4.0, 3.0])) == 3


def test_a_verdict_needs_the_interval_over_seeds_on_one_side_of_the_limit():
    claim = Claim("", "grows", "M_over_Q", tau, "depth", 0.5)
    assert claim.verdict(np.array([0.9, 0.95, 1.0])) == "holds"
    assert claim.verdict(np.array([0.1, 0.15, 0.2])) == "fails"
    assert claim.verdict(np.array([0.2, 0.9, 1.0])) == "open"
    assert claim.verdict(np.array([0.9])) == "open"
    falling = Claim("", "falls", "V_on_M_slope", None, "middle", 0.0, -1)
    assert falling.verdict(np.array([-0.9, -1.0, -1.1])) == "holds"
    random = np.random.default_rng(0)
    chance = [falling.verdict(random.standard_normal(3)) for _ in range(4000)]
    assert chance.count("holds") / 4000 == pytest.approx(0.025, abs=0.008)
    assert chance.count("fails") / 4000 == pytest.approx(0.025, abs=0.008)


def test_the_page_has_a_place_for_every_table():
    assert sorted(tables_of(PAGE.read_text())) == sorted(PLACES)
    with pytest.raises(ValueError, match="claims"):
        with_tables(PAGE.read_text(), dict.fromkeys(set(PLACES) - {"claims"}, ""))
    for file in re.findall(r"images/findings-[\w-]+\.png", PAGE.read_text()):
        assert (Path("docs") / file).exists()


@pytest.mark.parametrize("kind", KINDS)
def test_models_are_fed_what_they_are_measured_on(kind):
    setting = Setting(kind, Training(1, 16, 2, 1e-3, num_layers=1, width=32), 512)
    places = setting.places(64, seed=0)
    ids = setting.surrounded(setting.sequences(setting.text.token_ids, places))
    assert ids.shape == (4, 16)
    words = setting.sequences(setting.text.word_ids, places)
    assert words.shape == (4, setting.body)
    inputs = setting.inputs(
        setting.sequences(setting.text.token_ids, places), torch.Generator().manual_seed(0)
    )
    if kind == "decoder":
        assert torch.equal(inputs["input_ids"], ids)
    else:
        hidden = inputs["labels"] >= 0
        assert hidden.any()
        assert torch.equal(inputs["labels"][hidden], ids[hidden])
        assert not hidden[:, [0, -1]].any()
        assert torch.equal(inputs["input_ids"][~hidden], ids[~hidden])
    assert setting.new_model()(**inputs).loss.isfinite()
    row = setting.places(64, seed=3, in_a_row=True)
    assert (row.diff() == 1).all()


def test_steps_are_half_octaves():
    assert sorted(measured_steps(20)) == [0, 1, 2, 3, 4, 6, 8, 11, 16, 20]
