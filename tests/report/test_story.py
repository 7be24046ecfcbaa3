"""What happened, in words: a sentence on each headline number."""

from math import nan

import pandas as pd
import pytest

from embedgeo.report.runs import Run, make_run
from embedgeo.report.story import stories, story
from embedgeo.results.records import block_means

LAYERS = ("embed", "block.00", "block.01")


def run_of(means: dict[int, float], error: float | None = None, metric: str = "M_over_Q") -> Run:
    """A run of two blocks, one 0.1 below and one 0.1 above their mean."""
    records = [
        {
            "step": step,
            "layer": layer,
            "layer_index": i,
            "width": 16,
            "metric": metric,
            "value": mean + (0, -0.1, 0.1)[i],
            "stderr": error,
        }
        for step, mean in means.items()
        for i, layer in enumerate(LAYERS)
    ]
    return make_run("run", pd.DataFrame(records))


def test_a_sentence_says_where_a_number_began_turned_and_ended() -> None:
    run = run_of({0: 0.5, 10: 0.2, 100: 0.9, 1000: 0.75})
    assert story(run) == [
        "M / Q: 0.5 at step 0, lowest 0.2 at step 10, highest 0.9 at step 100, 0.75 at step 1,000 "
        "(0.65 at block.00 to 0.85 at block.01)."
    ]
    assert stories([run]) == [("run", story(run))]


def test_values_have_their_errors_and_two_measurements_are_enough() -> None:
    assert story(run_of({0: 0.5, 8: 0.7}, error=0.012)) == [
        "M / Q: 0.500 ± 0.012 at step 0, 0.700 ± 0.012 at step 8 "
        "(0.6 at block.00 to 0.8 at block.01)."
    ]


def test_a_mean_is_the_monitors_and_undefined_where_a_block_is() -> None:
    values = {0: (0.2, 0.4), 8: (0.3, 0.5), 9: (nan, 0.1)}
    records = [
        {"step": step, "layer": f"block.0{i}", "layer_index": i, "width": 8}
        | {"metric": metric, "value": value}
        for step, of_blocks in values.items()
        for i, value in enumerate(of_blocks)
        for metric in ("M_over_Q", "told")[: 2 - i]
    ]
    run = make_run("run", pd.DataFrame(records).assign(stderr=nan))
    (sentence,) = story(run)
    assert sentence.startswith("M / Q: 0.3 at step 0, 0.4 at step 8")
    for metric in ("M_over_Q", "told"):
        means = run.means(metric)["mean over blocks"]
        for step in values:
            own = [each for each in records if each["step"] == step and each["metric"] == metric]
            (mean,) = block_means(own)
            assert means[step] == pytest.approx(mean["value"], nan_ok=True)


@pytest.mark.parametrize("run", [run_of({4: 0.5}), run_of({0: 0.5, 8: 0.7}, metric="my_own")])
def test_one_measurement_and_other_numbers_have_no_sentence(run: Run) -> None:
    assert stories([run]) == []
