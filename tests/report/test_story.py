"""The story of a run: what is said of planted changes, and how seldom anything of none."""

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from embedgeo.glossary import headlines
from embedgeo.report import write_report
from embedgeo.report.runs import make_run
from embedgeo.report.story import Move, fluctuation, moves, running_medians, stories, story
from tests.report.synthetic import make_sweep

BLOCKS = [f"block.{i:02d}" for i in range(6)]
STEPS = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def run(values, errors=np.nan, steps=STEPS, metrics=("anisotropy",), label="a"):
    """A run, given values of shape (steps, blocks) or (metrics, steps, blocks)."""
    values = np.broadcast_to(values, (len(metrics), len(steps), len(BLOCKS)))
    errors = np.broadcast_to(errors, values.shape)
    places = itertools.product(enumerate(metrics), enumerate(steps), enumerate(BLOCKS))
    records = [
        {"step": step, "layer": layer, "layer_index": k, "width": 8, "metric": metric}
        | {"value": values[i, j, k], "stderr": errors[i, j, k]}
        for (i, metric), (j, step), (k, layer) in places
    ]
    return make_run(label, pd.DataFrame(records))


def hump(peaks, height=0.5):
    """A rise and a fall of each block over the places of steps, which begins earlier where its peak
    is earlier.
    """
    at = np.arange(len(STEPS))[:, None]
    return 0.08 + height * np.exp(-(((at - np.asarray(peaks)) / 1.5) ** 2) / 2)


def test_a_rise_and_a_fall_are_told_with_steps_errors_and_blocks():
    (sentence,) = story(run(hump([4.0] * 6), errors=0.01))
    assert sentence == (
        "anisotropy rose from 0.094 ± 0.010 at step 0 to 0.580 ± 0.010 by step 8 (all 6 blocks), "
        "fell to 0.094 ± 0.010 by step 128 (all 6 blocks); since then no change is significant."
    )


def test_a_peak_is_told_where_it_is_higher_than_what_was_reached_first():
    curve = np.array([0.08, 0.20, 0.48, 0.55, 0.58, 0.50, 0.30, 0.10, 0.08, 0.08, 0.08])
    (sentence,) = story(run(curve[:, None], errors=0.05))
    assert "by step 2 (all 6 blocks), highest 0.580 ± 0.050 at step 8, fell to" in sentence


def test_a_value_without_an_error_does_not_silence_the_others():
    errors = np.full((len(STEPS), len(BLOCKS)), 0.01)
    errors[5, 3] = np.nan
    (sentence,) = story(run(hump([4.0] * 6), errors=errors))
    assert sentence.startswith(
        "anisotropy rose from 0.094 ± 0.010 at step 0 to 0.580 ± 0.010 by step 8"
    )


@pytest.mark.parametrize(("sign", "said"), [(1, "the first first"), (-1, "the last first")])
def test_the_order_of_the_blocks_is_told(sign, said):
    (sentence,) = story(run(hump(4.5 + sign * 0.3 * np.arange(6)), errors=0.005))
    assert f"(all 6 blocks, {said})" in sentence


def test_blocks_that_did_not_move_are_not_counted():
    values = hump([4.0] * 6)
    values[:, 4:] = 0.08
    (sentence,) = story(run(values, errors=0.01))
    assert "(4 of 6 blocks)" in sentence


def test_what_came_to_rest_is_said():
    values = np.where(np.arange(len(STEPS)) < 4, 0.1, 0.6)[:, None]
    (sentence,) = story(run(values, errors=0.01))
    assert sentence.startswith(
        "anisotropy rose from 0.100 ± 0.010 at step 4 to 0.600 ± 0.010 by step 8"
    )
    assert sentence.endswith("; since then no change is significant.")


@pytest.mark.parametrize("errors", [0.3, np.nan])
def test_nothing_is_said_of_what_may_be_chance(errors):
    # errors too large, or unknown with few measurements
    assert story(run(hump([4.0] * 6), errors=errors)) == []


def test_without_standard_errors_the_fluctuation_counts():
    random = np.random.default_rng(0)
    steps = list(range(0, 6000, 100))
    values = 0.1 + 0.01 * random.standard_normal((60, 6))
    values[30:] += 0.5
    (sentence,) = story(run(values, steps=steps))
    assert sentence.startswith("anisotropy rose from")
    assert story(run(values[:30], steps=steps[:30])) == []


@pytest.mark.parametrize(
    ("place", "count"), [(0, 1), (1, 1), (2, 2), (30, 2), (56, 2), (58, 1), (59, 1)]
)
def test_an_outlier_or_two_are_no_change(place, count):
    values = 0.1 + 0.01 * np.random.default_rng(0).standard_normal((60, 6))
    values[place : place + count] += 50
    assert story(run(values, steps=list(range(60)))) == []


def test_running_medians_keep_what_rises_or_falls_and_drop_outliers():
    rising = np.arange(8.0) ** 2
    assert running_medians(rising).tolist() == rising.tolist()
    assert running_medians(-rising).tolist() == (-rising).tolist()
    level = np.repeat([0.0, 5.0], 8)
    assert running_medians(level).tolist() == level.tolist()
    for place in (0, 1, 2, 13, 14, 15):
        outlier = np.where(np.arange(16) == place, 100.0, level)
        assert running_medians(outlier) == pytest.approx(level)


def test_final_models_and_short_runs_have_none():
    assert story(run(hump([4.0] * 6)[:2], errors=0.001, steps=STEPS[:2])) == []
    assert (
        stories([run(hump([4.0] * 6), errors=0.3), run(hump([4.0] * 6), errors=0.01, label="b")])[
            0
        ][0]
        == "b"
    )


def test_turning_points():
    values = np.array([0.0, 5, 4, 10, 9, 3, 4, 3.5, 8])

    def constant(error):
        return lambda i, j: error * 2**0.5

    assert moves(values, constant(0.1), 3.0) == [
        Move(0, 1, 1),
        Move(1, 2, 2),
        Move(2, 3, 3),
        Move(3, 5, 5),
        Move(5, 6, 6),
        Move(6, 7, 7),
        Move(7, 8, 8),
    ]
    assert moves(values, constant(1.0), 3.0) == [Move(0, 3, 3), Move(4, 5, 5), Move(7, 8, 8)]
    assert moves(values, constant(100.0), 3.0) == []
    assert moves(values, constant(0.0), 3.0, least=2.0) == [
        Move(0, 3, 3),
        Move(3, 5, 5),
        Move(5, 8, 8),
    ]


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_fluctuation_is_that_of_an_autoregression(correlation):
    random = np.random.default_rng(1)
    found = [fluctuation(autoregression(random, 100, correlation)) for _ in range(200)]
    assert 0.9 < np.median(found) < 1.6
    assert fluctuation(np.zeros(30)) == 0
    assert fluctuation(np.zeros(19)) == np.inf


def autoregression(random, length, correlation, shape=(), freedom=np.inf):
    """Of standard deviation 1, stationary; with finite degrees of freedom Student's t is what is
    new at each value.
    """
    noise = random.standard_normal((length + 200, *shape))
    if freedom < np.inf:
        noise = random.standard_t(freedom, noise.shape) * np.sqrt(1 - 2 / freedom)
    values = noise.copy()
    for t in range(1, length + 200):
        values[t] = correlation * values[t - 1] + np.sqrt(1 - correlation**2) * noise[t]
    return values[200:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("freedom", "correlation"),
    [(np.inf, 0.0), (np.inf, 0.5), (np.inf, 0.9), (5, 0.5), (5, 0.9), (3, 0.0), (3, 0.5)],
)
@pytest.mark.parametrize("length", [20, 60, 200])
def test_little_is_said_of_runs_in_which_nothing_changes(freedom, correlation, length):
    random = np.random.default_rng(2)
    metrics = headlines()
    told = 0
    for _ in range(200):
        common = autoregression(random, length, correlation, (len(metrics), 1), freedom)
        values = (common + np.zeros((length, len(metrics), len(BLOCKS)))).transpose(1, 0, 2)
        told += bool(story(run(values, steps=list(range(length)), metrics=metrics)))
    assert told <= 20  # of 200: 5 % and three standard errors


@pytest.mark.slow
def test_little_is_said_where_standard_errors_are_known():
    random = np.random.default_rng(3)
    metrics = headlines()
    told = 0
    for _ in range(200):
        values = random.standard_normal((len(metrics), len(STEPS), 1)) + np.zeros(len(BLOCKS))
        told += bool(story(run(values, errors=1.0, metrics=metrics)))
    assert told <= 20


def of_groups(random, values, *, shared, own, groups=16):
    """A run of a sweep whose numbers are means over groups of text, which have much in common at
    all checkpoints.
    """
    num_metrics, num_steps, num_blocks = values.shape
    of_texts = shared * random.standard_normal((num_metrics, 1, num_blocks, groups))
    found = (
        values[..., None]
        + of_texts
        + own * random.standard_normal((num_metrics, num_steps, num_blocks, groups))
    )
    deviations = (found - found.mean(-1, keepdims=True)) / np.sqrt(groups * (groups - 1))
    metrics = headlines()[:num_metrics]
    errors = np.sqrt(np.square(deviations).sum(-1))
    made = run(found.mean(-1), errors, steps=STEPS[:num_steps], metrics=metrics)
    index = pd.MultiIndex.from_product([STEPS[:num_steps], BLOCKS], names=["step", "layer"])
    tables = {
        key: pd.DataFrame(deviations[i].reshape(-1, groups), index) for i, key in enumerate(metrics)
    }
    return made, replace(made, deviations=tables)


def test_what_all_checkpoints_have_in_common_cancels_in_the_errors_of_changes():
    values = hump([4.0] * 6, height=0.05)[None]
    unpaired, paired = of_groups(np.random.default_rng(0), values, shared=0.2, own=0.002)
    assert story(unpaired) == []
    (sentence,) = story(paired)
    assert "rose from" in sentence
    assert "(all 6 blocks)" in sentence
    assert "fell to" in sentence
    wiggles = values + 0.002 * np.resize([1, -1], len(STEPS))[:, None]  # each is significant
    _, paired = of_groups(np.random.default_rng(0), wiggles, shared=0.2, own=0.0001)
    (sentence,) = story(paired)
    assert sentence.count("fell") == 1
    assert sentence.endswith("; since then no change is more than a tenth of its range.")


@pytest.mark.slow
def test_little_is_said_of_a_sweep_in_which_nothing_changes():
    random = np.random.default_rng(4)
    flat = np.ones((len(headlines()), len(STEPS), len(BLOCKS)))
    told = sum(bool(story(of_groups(random, flat, shared=0.2, own=0.01)[1])) for _ in range(200))
    assert told <= 10


def test_page_and_terminal_open_with_it(tmp_path, capsys):
    make_sweep(tmp_path / "a", metrics=("n", "anisotropy"), stderr=0.01)
    page = write_report([tmp_path / "a"]).read_text()
    said = capsys.readouterr().err
    (sentence,) = [line for line in said.splitlines() if line.startswith("anisotropy")]
    assert page.index("What happened") < page.index("At a glance")
    assert sentence.split(" (")[0] in page
