"""What happened, in words: a sentence on each headline number."""

from dataclasses import replace
from math import nan

import pandas as pd
import pytest
from matplotlib.text import Text

from embedgeo.report import figures
from embedgeo.report.comparison import compare_dynamics
from embedgeo.report.runs import make_run, runs_of_records, with_baseline
from embedgeo.report.story import story
from embedgeo.report.verdicts import verdicts


def records_of(metric, step, error=nan, **values):
    layers = {"mean": ("mean", -1), "embed": ("embed", 0), "b0": ("block.00", 1)}
    layers["b1"] = "block.01", 2
    return [
        {"step": step, "layer": layers[key][0], "layer_index": layers[key][1]}
        | {"width": 8, "metric": metric, "value": value, "stderr": error}
        for key, value in values.items()
    ]


def run_of(means, error=nan, metric="M_over_Q"):
    """A run of two blocks, one 0.1 below and one 0.1 above their mean."""
    records = []
    for step, mean in means.items():
        of_layers = {"embed": mean, "b0": mean - 0.1, "b1": mean + 0.1}
        records += records_of(metric, step, error, **of_layers)
    return replace(runs_of_records(pd.DataFrame(records))[0], label="run")


def test_a_sentence_says_where_a_number_began_turned_and_ended():
    run = run_of({0: 0.5, 10: 0.2, 100: 0.9, 1000: 0.75}, error=0.012)
    assert story(run) == [
        "M / Q: 0.500 ± 0.012 at step 0, lowest 0.200 ± 0.012 at step 10, "
        "highest 0.900 ± 0.012 at step 100, 0.750 ± 0.012 at step 1,000 "
        "(0.65 at block.00 to 0.85 at block.01)."
    ]


def test_a_mean_is_the_one_on_record_or_there_is_none():
    records = [
        each
        for step in (0, 8)
        for each in (
            *records_of("M_over_Q", step, b0=0.2, b1=0.4, mean=0.7),
            *records_of("none", step, b0=1.0, b1=2.0),
            *records_of("told", step, mean=9.0 + step),
        )
    ]
    run = make_run("run", pd.DataFrame(records))
    (sentence,) = story(run)
    assert sentence.startswith("M / Q: 0.7 at step 0, 0.7 at step 8")
    assert "mean over blocks" not in figures.dynamics(run, "none").numbers
    assert [*figures.dynamics(run, "told").numbers["mean over blocks"]] == [9.0, 17.0]
    assert run.varies("told")


@pytest.mark.parametrize(
    ("b0", "rows", "value"), [({}, "all rows", 301), ({"b0": 2.0}, "without massive rows", 2.5)]
)
def test_lines_and_sentences_say_of_which_rows_they_are(b0, rows, value):
    records = []
    for step in (0, 8):
        records += records_of("V_W_over_V_unbiased", step, b0=2.0, b1=600.0)
        records += records_of("V_W_over_V_unbiased_without_massive", step, b1=3.0, **b0)
        records += records_of("n", step, b0=0.0, b1=9.0)
        records += records_of("M_over_Q", step, b0=0.5, b1=0.5)
    run = with_baseline(runs_of_records(pd.DataFrame(records))[0])
    assert story(run)[0].startswith(f"V_W / V, {rows}: {value:.4g} at step 0")
    for draw in (figures.dynamics, figures.profile):
        names = [*map(str, draw(run, "V_W_over_V_unbiased").numbers)]
        both = ("without massive rows", "all rows", "Gaussian rows")
        assert all(name.endswith(both) for name in names), names
    numbers = figures.dynamics(run, "V_W_over_V_unbiased").numbers
    assert numbers[f"mean over blocks, {rows}"][8] == value
    assert numbers["block.01, all rows"][8] == 600.0
    figure = figures.dynamics(run, "V_W_over_V_unbiased").figure
    shown = " ".join(text.get_text() for text in figure.findobj(Text))
    assert rows == "all rows" or "beyond: all rows 2 to 600" in shown
    sentences, _ = verdicts(run, run, [])
    assert sentences[0].startswith("V_W / V, all rows: 301 in ")
    assert sentences[1].startswith("V_W / V without massive rows: 2.5 in ") == bool(b0)
    figure = compare_dynamics([run], "V_W_over_V_unbiased").figure
    assert "all rows; " in " ".join(text.get_text() for text in figure.findobj(Text))
    assert run.baseline["M_over_Q"].isna().tolist() == [True, False] * 2  # no rows, none


@pytest.mark.parametrize("run", [run_of({4: 0.5}), run_of({0: 0.5, 8: 0.7}, metric="my_own")])
def test_one_measurement_and_other_numbers_have_no_sentence(run):
    assert story(run) == []
