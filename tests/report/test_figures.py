from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb

from embedgeo import TokenMoments
from embedgeo.drawing import WIDTH, FigureData, StepAxis, new_figure, style, thinned
from embedgeo.glossary import known_terms
from embedgeo.report import comparison, figures, tokens, variance
from embedgeo.report.figures import curves
from embedgeo.report.runs import Run, read_runs
from tests.report.synthetic import METRICS, PYTHIA_STEPS, layer_names, make_sweep

DRAWN = {key: term for key, term in known_terms().items() if term.is_drawn}
LONGEST = sorted(DRAWN, key=lambda metric: len(DRAWN[metric].name))[-2:]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = make_sweep(
        tmp_path_factory.mktemp("large"),
        PYTHIA_STEPS,
        31,
        losses={512: 12.0},
        metrics=[*METRICS, *LONGEST, "anisotropy_z_scored", "mean_cosine_whitened"],
        tokens=True,
        spectra=9,
    )
    (run,) = read_runs([folder])
    return run


@pytest.fixture(scope="module")
def two_sided(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = make_sweep(
        tmp_path_factory.mktemp("t5"),
        num_blocks=12,
        losses={512: 12.0},
        metrics=[*METRICS, "anisotropy_z_scored", "mean_cosine_whitened"],
        tokens=True,
        spectra=1,
        sides=("encoder.", "decoder."),
        changes={(step, "encoder.embed", "V"): 1e-5 for step in (0, 1)},
    )
    (run,) = read_runs([folder])
    return run


def drawn(run: Run) -> list[FigureData]:
    metrics = ("V", "V_W_over_V_unbiased", "intrinsic_dimension", "M_over_Q")
    metrics += tuple(metric for metric in LONGEST if metric in run.values)
    return [
        *(figures.dynamics(run, metric) for metric in metrics),
        *(figures.profile(run, metric) for metric in metrics),
        *(figures.heatmap(run, metric) for metric in metrics),
        figures.composition(run, "layer"),
        figures.composition(run, "step"),
        *figures.processing_figures(run),
        *figures.loss_figures(run),
        comparison.compare_dynamics([run, run], "V"),
        comparison.compare_profiles([run, run], "V"),
        comparison.compare_profiles([run], "M_over_Q"),
        tokens.mean_against_variance(run),
        tokens.mean_against_variance(run, [run.depth[-1]]),
        tokens.statistics(run),
        tokens.against_frequency(run),
        tokens.histograms(run),
        *variance.spectra_figures(run),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("run", ["large", "two_sided"])
def test_nothing_overlaps_or_leaves_the_picture(run: str, request: pytest.FixtureRequest) -> None:
    with style():
        for name, figure, *_ in drawn(request.getfixturevalue(run)):
            figure.canvas.draw()
            renderer = figure.canvas.get_renderer()
            picture = figure.bbox
            for ax in figure.axes:
                texts = [*ax.texts, ax.title, ax.xaxis.label, ax.yaxis.label]
                for axis, low, high in ((ax.xaxis, "x0", "x1"), (ax.yaxis, "y0", "y1")):
                    labels = [
                        tick.label1 for tick in axis._update_ticks() if tick.label1.get_text()
                    ]
                    labels = [label for label in labels if label.get_visible()]
                    boxes = sorted(
                        (b.get_window_extent(renderer) for b in labels),
                        key=lambda box: getattr(box, low),
                    )
                    assert all(getattr(b, low) >= getattr(a, high) for a, b in pairwise(boxes)), (
                        name,
                        labels,
                    )
                    texts += labels
                for text in [
                    *texts,
                    *figure.texts,
                    *(text for box in figure.legends for text in box.get_texts()),
                ]:
                    if text.get_visible() and text.get_text():
                        box = text.get_window_extent(renderer)
                        inside = (picture.x0 - 1 <= box.x0, box.x1 <= picture.x1 + 1)
                        assert all((*inside, picture.y0 - 1 <= box.y0, box.y1 <= picture.y1 + 1)), (
                            name,
                            text,
                        )
                label = ax.yaxis.label.get_window_extent(renderer)
                assert not any(
                    label.overlaps(box.get_window_extent(renderer)) for box in figure.legends
                ), name


def test_zeros_are_low_on_a_logarithmic_heatmap_not_undefined(tmp_path: Path) -> None:
    zero = {(step, "embed", "V_W_unbiased"): 0.0 for step in (0, 1, 8, 64)}
    undefined = {(512, "embed", "V_W_unbiased"): np.nan}
    (run,) = read_runs(
        [make_sweep(tmp_path, metrics=("n", "V_W_unbiased"), changes=zero | undefined)]
    )
    with style():
        mesh = figures.heatmap(run, "V_W_unbiased").figure.axes[0].collections[0]
    assert type(mesh.norm).__name__ == "LogNorm"
    shown = mesh.norm(mesh.get_array())[0]
    assert shown.mask.tolist() == [False, False, False, False, True, False]
    assert shown[:4].tolist() == [0, 0, 0, 0]


def test_a_heatmap_of_a_single_step_has_a_column(tmp_path: Path) -> None:
    (run,) = read_runs([make_sweep(tmp_path, steps=(7,), metrics=("n", "M"))])
    with style():
        ax = figures.heatmap(run, "M").figure.axes[0]
    assert ax.get_xlim() == (6.5, 7.5)
    assert ax.collections[0].get_array().shape == (5, 1)


def test_a_heatmap_whose_blocks_agree_spans_the_other_layers(tmp_path: Path) -> None:
    other = {(step, "embed", "n_points"): 900.0 for step in (0, 1, 8, 64, 512, 4000)}
    (run,) = read_runs([make_sweep(tmp_path, metrics=("n", "n_points"), changes=other)])
    with style():
        mesh = figures.heatmap(run, "n_points").figure.axes[0].collections[0]
    assert mesh.get_clim() == (900, 4096)


def test_a_baseline_that_is_mostly_far_off_is_named_not_drawn(large: Run) -> None:
    for far, drawn_points in ((1e9, 0), (0.3, 154)):
        baseline = pd.DataFrame({"M_over_Q": far}, large.values.index)
        baseline.loc[0, "M_over_Q"] = 0.3
        with style():
            (ax, *_) = figures.dynamics(replace(large, baseline=baseline), "M_over_Q").figure.axes
        (line,) = (line for line in ax.lines if str(line.get_label()).startswith("Gaussian rows"))
        assert len(line.get_xdata()) == drawn_points
        assert line.get_label() == (
            "Gaussian rows" if drawn_points else "Gaussian rows: 0.3 to 1B ↑"
        )
        assert ax.get_ylim()[1] < 1


@pytest.mark.parametrize(
    ("count", "most", "places"),
    [(0, 9, []), (5, 9, [0, 1, 2, 3, 4]), (34, 6, [0, 7, 13, 20, 26, 33])],
)
def test_a_few_of_many_are_evenly_spaced_with_the_first_and_the_last(count, most, places):
    assert thinned(count, most) == places


@pytest.mark.parametrize(
    ("steps", "ticks"),
    [
        ([7], [7]),
        ([0, 1, 8, 64, 512, 4000], [0, 1, 10, 100, 1000]),
        ([0, 500, 1000, 1500], [0, 500, 1000, 1500]),
        ([15, 16, 20, 30, 60], [20, 50]),
        ([110, 111, 115, 120, 130], [110, 130]),
    ],
)
def test_steps_have_round_ticks(steps: list[int], ticks: list[int]) -> None:
    axis = StepAxis(steps)
    assert axis.ticks() == ticks
    places = axis.position(steps)
    assert (places[0], places[-1]) == (0, len(steps) > 1)
    assert all(b > a for a, b in pairwise(places))


@pytest.mark.slow
def test_logarithmic_axes_say_so(large: Run) -> None:
    with style():
        for name, figure, *_ in drawn(large):
            for ax in figure.axes:
                for axis, scale in ((ax.xaxis, ax.get_xscale()), (ax.yaxis, ax.get_yscale())):
                    if scale != "linear":
                        assert "log scale" in axis.label.get_text(), name


def test_regressions_over_token_types_are_those_of_the_metric(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    ids = (torch.rand(4000, generator=random) ** 3 * 60).long()
    means = torch.randn(60, 8, generator=random) * torch.linspace(0.5, 2, 60)[:, None]
    rows = means[ids] + torch.randn(4000, 8, generator=random)
    metric = TokenMoments(8)
    metric.update(rows, token_ids=ids)
    values = metric.compute()
    table = pd.DataFrame({key: value.numpy() for key, value in metric.table().items()})
    layers = [
        table.assign(layer=layer, layer_index=i) for i, layer in enumerate(("embed", "block.00"))
    ]
    folder = make_sweep(tmp_path, (0, 1), 1, metrics=("n", "M"), tokens=True)
    for path in (folder / "tokens").iterdir():
        pd.concat(layers).to_parquet(path)
    (run,) = read_runs([folder])
    with style():
        found = tokens.statistics(run).numbers.loc[1, "embed"]
        slopes = tokens.against_frequency(run).text
    for key in ("Q_t_cv", "V_on_M_slope", "V_on_M_r2"):
        assert found[key] == pytest.approx(values[key].item(), rel=1e-9)
    for key in "QMV":
        assert f"{key} {values[f'{key}_freq_slope'].item():.3g}" in slopes


def test_shares_add_up_to_the_whole(large: Run) -> None:
    with style():
        found, means = (
            figures.composition(large, "layer").numbers,
            figures.composition(large, "step").numbers,
        )
    np.testing.assert_allclose(found.sum(axis=1), 1)
    at = large.values.loc[4000, "block.20"]
    assert found.loc[(4000, "block.20"), "M"] == pytest.approx(at["M"] / at["Q"])
    of_blocks = found.loc[4000].filter(like="block.", axis=0).mean()
    pd.testing.assert_series_equal(means.loc[4000], of_blocks, check_names=False)


def test_without_token_ids_the_shares_are_those_of_offset_and_variance(tmp_path: Path) -> None:
    nowhere = {(8, "block.00", "M"): np.nan, (8, "block.01", "M"): 0.0, (8, "block.01", "V"): 0.0}
    (run,) = read_runs([make_sweep(tmp_path, (0, 8), 2, metrics=("n", "M", "V"), changes=nowhere)])
    with style():
        found = figures.composition(run, "layer")
    heights = {
        bars.get_label(): [bar.get_height() for bar in bars]
        for bars in found.figure.axes[0].containers
    }
    assert heights.keys() == {"M: offset", "V: variance"}
    np.testing.assert_allclose(np.sum([*heights.values()], axis=0), [1, 0, 0, 1])
    assert found.numbers.loc[8].loc[["block.00", "block.01"]].isna().all(axis=None)


def test_encoder_and_decoder_have_means_and_lines_of_their_own(two_sided: Run) -> None:
    with style():
        dynamics = figures.dynamics(two_sided, "M").numbers
        profile = figures.profile(two_sided, "M")
        compared = comparison.compare_profiles([two_sided], "M").numbers["M"]
        heatmap = figures.heatmap(two_sided, "M")
    values = two_sided.values["M"].unstack("layer")
    for side in ("encoder", "decoder"):
        blocks = [f"{side}.block.{i:02d}" for i in range(12)]
        np.testing.assert_allclose(dynamics[f"{side} mean"], values[blocks].mean(axis=1))
        curve = compared[f"{two_sided.label}, {side}"]
        np.testing.assert_allclose(curve.index, np.arange(13) / 12)
        np.testing.assert_allclose(curve, values.loc[4000, [f"{side}.embed", *blocks]])
    line = profile.figure.axes[0].lines[-2].get_ydata()  # of the last step; then the baseline's
    assert np.flatnonzero(np.isnan(line)).tolist() == [14]
    expected = [f"{side}.{name}" for side in ("encoder", "decoder") for name in layer_names(12)]
    assert list(profile.numbers.index) == list(heatmap.numbers.index) == expected
    (gap,) = (
        patch for patch in heatmap.figure.axes[0].patches if patch.get_facecolor() == (1, 1, 1, 1)
    )
    assert (gap.get_y(), gap.get_height()) == (13.5, 1)


def test_the_colours_of_a_heatmap_span_the_blocks(large: Run) -> None:
    with style():
        picture = figures.heatmap(large, "intrinsic_dimension")
    mesh, bar = picture.figure.axes[0].collections[0], picture.figure.axes[1]
    blocks = large.values["intrinsic_dimension"].unstack("layer")[large.blocks["mean over blocks"]]
    assert mesh.get_clim() == pytest.approx((blocks.min(axis=None), blocks.max(axis=None)))
    assert picture.text.endswith("the bar's tip.")
    assert bar.get_ylim() == pytest.approx(mesh.get_clim())


def test_chosen_tokens_are_drawn_with_the_origin(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path, (0, 1), 1, metrics=("n", "M"))
    (folder / "projections").mkdir()
    texts = {-1: None, 0: "t0", 1: " \n", 2: "$bad{_"}
    rows = [
        (layer, i, token_id, texts[token_id], 10.0 + token_id, token_id - 1.0, 0.5 * i)
        for i, layer in enumerate(("embed", "block.00"))
        for token_id in (-1, 0, 1, 2)
    ]
    columns = ["layer", "layer_index", "token_id", "token", "n", "pc1", "pc2"]
    pd.DataFrame(rows, columns=columns).to_parquet(folder / "projections" / "step1.parquet")
    (run,) = read_runs([folder])
    with style():
        picture = tokens.projection(run)
        picture.figure.canvas.draw()
    assert len(picture.numbers) == 8
    origin = picture.figure.axes[1].lines[0]
    assert (origin.get_xdata()[0], origin.get_ydata()[0]) == (-2.0, 0.5)
    assert {text.get_text() for text in picture.figure.axes[0].texts} == {"t0", "␣\\n", "$bad{_"}


def test_the_axis_spans_the_blocks_and_names_layers_far_beyond(tmp_path: Path) -> None:
    steps = (0, 1, 8, 64, 512, 4000)
    far = {
        (step, layer, "M_over_V"): value
        for step in steps
        for layer, value in (("embed", 90.0), ("final_norm", -3.0))
    }
    near = {(step, f"block.0{i}", "M_over_V"): 0.2 + 0.1 * i for step in steps for i in range(3)}
    (run,) = read_runs([make_sweep(tmp_path, steps, metrics=("M_over_V",), changes=far | near)])
    with style():
        for draw in (figures.dynamics, figures.profile):
            ax = draw(run, "M_over_V").figure.axes[0]
            low, high = ax.get_ylim()
            assert (-0.3 < low < 0.2, 0.4 < high < 0.6) == (True, True), draw
            assert {text.get_text() for text in ax.texts} == {
                "↑ beyond: embed 90",
                "↓ beyond: norm −3",
            }


@pytest.mark.parametrize(
    ("metric", "of_blocks", "of_norm", "is_shown"),
    [
        ("Q", (0.5, 12.0), 72.8, True),
        ("cka_to_first", (0.1, 0.4), 1.0, True),
        ("cka_to_first", (0.9, 1.0), 0.2, False),
    ],
)
def test_a_layer_that_leaves_the_blocks_a_good_part_of_the_axis_is_shown_whole(
    metric: str, of_blocks: tuple[float, float], of_norm: float, *, is_shown: bool, tmp_path: Path
) -> None:
    steps = (0, 1, 8, 64)
    wanted = {(step, f"block.0{i}", metric): at for step in steps for i, at in enumerate(of_blocks)}
    wanted |= {
        (step, layer, metric): of_blocks[0] for step in steps for layer in ("embed", "block.02")
    }
    wanted |= {(step, "final_norm", metric): of_norm for step in steps}
    wanted |= {(step, "final_norm", "norm_Q_expected"): 72.0 for step in steps}
    (run,) = read_runs(
        [make_sweep(tmp_path, steps, metrics=(metric, "norm_Q_expected"), changes=wanted)]
    )
    expected = run.values["norm_Q_expected"].where(run.values.index.isin(["final_norm"], "layer"))
    run = replace(run, values=run.values.assign(norm_Q_expected=expected))
    with style():
        for draw in (figures.dynamics, figures.profile):
            ax = draw(run, metric).figure.axes[0]
            low, high = ax.get_ylim()
            assert (low <= of_norm <= high, bool(ax.texts)) == (is_shown, not is_shown)
            assert low <= of_blocks[0] < of_blocks[1] <= high


def test_the_legend_names_no_line_that_is_not_seen(tmp_path: Path) -> None:
    steps = (0, 1, 8)
    far = {(step, "final_norm", key): 1e9 for step in steps for key in ("Q", "norm_Q_expected")}
    near = {(step, f"block.0{i}", "Q"): 5.0 + i for step in steps for i in range(3)}
    (run,) = read_runs(
        [make_sweep(tmp_path, steps, metrics=("Q", "norm_Q_expected"), changes=far | near)]
    )
    expected = run.values["norm_Q_expected"].where(run.values.index.isin(["final_norm"], "layer"))
    run = replace(run, values=run.values.assign(norm_Q_expected=expected))
    with style():
        for draw, named in (
            (figures.dynamics, ["mean over blocks"]),
            (figures.profile, ["step 8"]),
        ):
            assert draw(run, "Q").figure.axes[0].get_legend_handles_labels()[1] == named


def test_a_long_name_is_no_longer_than_its_axis(tmp_path: Path) -> None:
    metric, steps = "effective_rank_eigenvalues", (0, 1, 8)
    changes = {(step, f"block.0{i}", metric): 10.0**i for step in steps for i in range(3)}
    (run,) = read_runs([make_sweep(tmp_path, steps, metrics=(metric,), changes=changes)])
    with style():
        figure = figures.dynamics(run, metric).figure
        figure.canvas.draw()
    ax = figure.axes[0]
    assert ax.get_ylabel() == "effective rank of eigenvalues (log scale)"
    assert ax.yaxis.label.get_window_extent().height <= ax.get_window_extent().height


def test_a_baseline_that_is_shown_is_shown_whole(tmp_path: Path) -> None:
    steps = (0, 1, 8, 64)
    wanted = {
        (step, f"block.0{i}", "M"): at for step in steps for i, at in enumerate((0.1, 1.0, 10.0))
    }
    (run,) = read_runs([make_sweep(tmp_path, steps, metrics=("M",), changes=wanted)])
    baseline = pd.DataFrame({"M": 0.05}, run.values.index)
    baseline.loc[0, "M"] = 0.002
    with style():
        low, _ = figures.dynamics(replace(run, baseline=baseline), "M").figure.axes[0].get_ylim()
    assert low < 0.002


def test_modules_have_distinct_labels(tmp_path: Path) -> None:
    layers = [f"gpt_neox.layers.{i}.attention.dense" for i in range(8)]
    rows = [
        (step, layer, i, 8, "M", 1.0 + step + i, 0.1)
        for step in (0, 5)
        for i, layer in enumerate(layers)
    ]
    columns = ["step", "layer", "layer_index", "width", "metric", "value", "stderr"]
    pd.DataFrame(rows, columns=columns).to_parquet(tmp_path / "history.parquet")
    (run,) = read_runs([tmp_path])
    with style():
        ax = figures.profile(run, "M").figure.axes[0]
    assert [label.get_text() for label in ax.get_xticklabels()] == [str(i) for i in range(8)]
    assert ax.get_xlabel() == "layer: * in gpt_neox.layers.*.attention.dense"


def test_one_step_is_drawn_as_points_without_a_bar_of_steps(tmp_path: Path) -> None:
    (run,) = read_runs([make_sweep(tmp_path, (7,), metrics=("n", "M"))])
    with style():
        (ax,) = figures.profile(run, "M").figure.axes
    assert ax.lines[0].get_marker() == "o"


def test_one_layer_has_no_bar_of_layers(tmp_path: Path) -> None:
    rows = [(step, "all", 0, 8, "M", 1.0 + step, np.nan) for step in (0, 5)]
    columns = ["step", "layer", "layer_index", "width", "metric", "value", "stderr"]
    pd.DataFrame(rows, columns=columns).to_parquet(tmp_path / "history.parquet")
    (run,) = read_runs([tmp_path])
    with style():
        assert len(figures.dynamics(run, "M").figure.axes) == 1


def test_twelve_runs_have_twelve_colours_and_their_names_below_the_axes(large: Run) -> None:
    runs = [replace(large, label=f"a run with a rather long name, seed {i}") for i in range(12)]
    with style():
        figure = comparison.compare_dynamics(runs, "M_over_Q").figure
        figure.canvas.draw()
    (ax,) = figure.axes
    (legend,) = figure.legends
    assert len({tuple(to_rgb(line.get_color())) for line in ax.lines}) == 12
    assert [text.get_text().strip() for text in legend.get_texts()] == [run.label for run in runs]
    assert legend.get_window_extent().y1 <= ax.xaxis.label.get_window_extent().y0
    assert figure.get_size_inches()[0] == pytest.approx(WIDTH)  # fits a narrow screen


@pytest.mark.slow
def test_steps_of_several_runs_are_logarithmic_where_those_of_one_are(tmp_path: Path) -> None:
    runs = read_runs(
        [
            make_sweep(tmp_path / str(i), (0, 1, 8, 64, 512 + i, 4000), 1, metrics=("M",))
            for i in range(12)
        ]
    )
    with style():
        assert "log scale" in comparison.compare_dynamics(runs, "M").figure.axes[0].get_xlabel()


def bands(data: FigureData) -> list[tuple[float, float, float]]:
    """The abscissa at which each band of a figure is highest, and its lower and upper end there."""
    found = []
    for band in data.figure.axes[0].collections:
        if isinstance(band, PolyCollection) and len(band.get_paths()):
            points = np.concatenate([path.vertices for path in band.get_paths()])
            x = points[points[:, 1].argmax(), 0]
            found.append((x, *(end(points[points[:, 0] == x, 1]) for end in (np.min, np.max))))
    return found


@pytest.fixture(scope="module")
def with_errors(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = make_sweep(tmp_path_factory.mktemp("errors"), metrics=("n", "M_over_Q"), stderr=0.05)
    (run,) = read_runs([folder])
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "count"),
    [
        (figures.dynamics, 6),
        (figures.profile, 6),
        (lambda *what: comparison.compare_dynamics([what[0]], what[1]), 1),
        (lambda *what: comparison.compare_profiles([what[0]], what[1]), 1),
        (curves, 4),
    ],
)
def test_bands_are_one_standard_error_to_each_side(
    with_errors: Run, draw: Callable, count: int
) -> None:
    with style():
        drawn = draw(with_errors, "M_over_Q")
        without = draw(replace(with_errors, errors=with_errors.errors * np.nan), "M_over_Q")
    found = bands(drawn)
    assert len(found) == count
    for _, low, high in found:
        assert (high - low) / (high + low) == pytest.approx(0.05)
    assert not bands(without)
    top = max(high for _, _, high in found)
    assert drawn.figure.axes[0].get_ylim()[1] > top or draw is curves or draw is figures.profile


def test_standard_errors_lie_beside_the_numbers_of_a_figure(with_errors: Run) -> None:
    with style():
        dynamics, profile = (
            figures.dynamics(with_errors, "M_over_Q"),
            figures.profile(with_errors, "M_over_Q"),
        )
        compared = comparison.compare_profiles([with_errors], "M_over_Q")
        without = figures.dynamics(
            replace(with_errors, errors=with_errors.errors * np.nan), "M_over_Q"
        )
    for numbers, columns in (
        (dynamics.numbers, [*with_errors.layers, "mean over blocks"]),
        (profile.numbers, [8, 64]),
    ):
        for column in columns:
            np.testing.assert_allclose(numbers[f"stderr of {column}"], 0.05 * numbers[column])
    np.testing.assert_allclose(
        compared.numbers["stderr of M_over_Q"], 0.05 * compared.numbers["M_over_Q"]
    )
    assert not [column for column in without.numbers if column.startswith("stderr")]
    assert all("one standard error" in data.text for data in (dynamics, profile, compared))
    assert "standard error" not in without.text


def test_the_error_of_a_mean_over_blocks_is_unknown_where_that_of_a_block_is(
    with_errors: Run,
) -> None:
    errors = with_errors.errors.copy()
    errors.loc[(8, "block.01"), "M_over_Q"] = np.nan
    errors.loc[(64, "embed"), "M_over_Q"] = np.nan
    found = replace(with_errors, errors=errors).bands("M_over_Q").means["mean over blocks"]
    assert found.index[found.isna()].tolist() == [8]


def test_bands_that_are_wider_than_the_curves_do_not_squeeze_them(with_errors: Run) -> None:
    with style():
        ax = comparison.compare_profiles(
            [replace(with_errors, errors=with_errors.values * 100)], "M_over_Q"
        ).figure.axes[0]
    values = ax.lines[0].get_ydata()
    low, high = ax.get_ylim()
    assert 0.15 < np.ptp(values) / (high - low) < 0.3


def test_shares_say_how_they_are_estimated(large: Run) -> None:
    with style():
        texts = [text.get_text() for text in figures.composition(large, "layer").figure.texts]
        statistics = [text.get_text() for text in tokens.statistics(large).figure.texts]
    assert "shares of the mean squared norm, from pairs in different sequences" in texts
    assert "over the token types with 10 ≤ n ≤ 100,000 occurrences" in statistics


def test_the_title_and_the_unit_of_every_metric_fit_into_a_figure():
    with style():
        figure, _ = new_figure("title", "unit")
        for metric, named in known_terms().items():
            for text, shown in zip(
                figure.texts, (f"{named.name} through the layers", named.unit), strict=True
            ):
                text.set_text(shown)
                if named.is_drawn:
                    assert text.get_window_extent().x1 <= figure.bbox.width, metric
