"""Figures of the intrinsic dimension over scales."""

from dataclasses import replace

import numpy as np

from embedgeo.drawing import style
from embedgeo.studies import scales

SCALES = [1, 2, 4, 8, 16, 32, 64]


def test_layers_are_drawn_against_scale_with_their_errors(run):
    without = replace(run, errors=run.errors * np.nan)
    last = run.values.loc[run.steps[-1]]
    with style():
        data, of_likelihood = (scales.scales_by_layer(each) for each in (run, without))
    assert data.numbers.index.tolist() == SCALES
    for scale in SCALES:
        key = f"intrinsic_dimension_at_{scale}"
        numbers, others = data.numbers.loc[scale], of_likelihood.numbers.loc[scale]
        for layer in run.depth:
            assert numbers[layer] == others[layer] == last.loc[layer, key]
            # the jackknife's come first
            assert numbers[f"stderr of {layer}"] == run.errors.loc[(4000, layer), key]
            assert others[f"stderr of {layer}"] == last.loc[layer, f"{key}_error"]
    ticks = data.figure.axes[0].get_xticklabels()
    assert [tick.get_text() for tick in ticks] == [str(scale) for scale in SCALES]


def test_steps_are_drawn_against_scale_as_means_over_blocks(run):
    with style():
        numbers = scales.scales_by_step(run).numbers
    assert numbers.index.tolist() == run.steps
    means = run.means(run.table("intrinsic_dimension_at_8"))["mean over blocks"]
    np.testing.assert_allclose(numbers[8], means)


def test_runs_of_one_scale_or_none_have_no_such_figure(run):
    for keys in (["n"], ["n", "intrinsic_dimension_at_4"]):
        assert scales.measured_scales(replace(run, values=run.values[keys])) == {}
