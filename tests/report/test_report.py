import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from errno import ENOSPC
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from embedgeo import IntrinsicDimension, StepMonitor, load_results, observe
from embedgeo.cli import main
from embedgeo.drawing import SMALL, FigureData, style
from embedgeo.report import comparison, figures, write_report
from embedgeo.report import page as plan
from embedgeo.report.page import BUDGET
from embedgeo.report.runs import read_runs
from embedgeo.report.summary import apart, flags, origins
from embedgeo.results.folder import SweepFolder
from embedgeo.results.parquet import HistoryFile
from tests.browser.chromium import CHROMIUM
from tests.files import contents
from tests.models import gpt2, gpt_neox, token_batch
from tests.report.synthetic import layer_names, make_models, make_sweep
from tests.training.runs import moments

SOME = (
    *(
        "n",
        "Q",
        "M",
        "V_W_unbiased",
        "V_B_unbiased",
        "anisotropy",
        "anisotropy_null",
        "intrinsic_dimension",
    ),
    *("n_points", "n_nonfinite"),
)
KINDS = ("dynamics", "profile", "heatmap")


class Page(HTMLParser):
    """What a page is made of: tags with their attributes, headings and text, but for scripts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if not self.tags or self.tags[-1][0] != "script":
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "mine"
    make_sweep(
        folder,
        duplicates={1: 0},
        losses={64: 30.0},
        changes={(512, "block.01", "n_nonfinite"): 7.0, (8, "embed", "anisotropy"): np.nan},
        metrics=SOME,
        tokens=True,
    )
    (folder / "failed").mkdir()
    (folder / "failed" / "step16.txt").write_text("FileNotFoundError: <no> config.json\n")
    return folder


@pytest.fixture(scope="module")
def page(sweep: Path) -> Page:
    return Page(write_report([sweep]))


@pytest.mark.slow
def test_every_figure_lies_as_png_and_svg_beside_its_numbers(sweep: Path, page: Page) -> None:
    figures = sweep / "report" / "figures"
    stems = {path.stem for path in figures.iterdir()}
    assert {f"{metric}-{kind}" for metric in ("Q", "M", "anisotropy") for kind in KINDS} <= stems
    assert {
        "decomposition",
        "loss",
        "tokens-V-against-M",
        "tokens-statistics",
        "tokens-histograms",
    } <= stems
    assert {path.name for path in figures.iterdir()} == {
        f"{s}.{end}" for s in stems for end in ("png", "svg", "csv")
    }
    assert len(page.all("img")) == len(stems)


def test_numbers_are_those_of_the_records(sweep: Path, page: Page) -> None:
    records = pd.concat(pd.read_parquet(path) for path in (sweep / "checkpoints").glob("*.parquet"))
    expected = records[records["metric"] == "M"].pivot(
        index="step", columns="layer", values="value"
    )
    found = pd.read_csv(sweep / "report" / "figures" / "M-dynamics.csv", index_col="step")
    pd.testing.assert_frame_equal(found[expected.columns], expected, check_names=False)
    blocks = [layer for layer in expected if layer.startswith("block.")]
    np.testing.assert_allclose(found["mean over blocks"], expected[blocks].mean(axis=1))
    profile = pd.read_csv(sweep / "report" / "figures" / "M-profile.csv", index_col="layer")
    np.testing.assert_allclose(profile["4000"], expected.loc[4000, profile.index], rtol=1e-14)
    everything = pd.read_csv(sweep / "report" / "metrics.csv").set_index(
        ["step", "layer", "metric"]
    )
    assert len(everything) == records["value"].notna().sum()
    at = everything.loc[64, "block.00", "M"]
    assert at["value"] == pytest.approx(expected.loc[64, "block.00"], rel=1e-14)
    assert at["gaussian"] == pytest.approx(everything.loc[(64, "block.00", "Q"), "value"] / 65_536)


@pytest.mark.slow
def test_what_the_loss_needs_is_drawn_over_depth_and_training(tmp_path: Path) -> None:
    changes = [
        f"loss_change_{name}"
        for name in ("without_offset", "without_1_directions", "without_context")
    ]
    sweep = make_sweep(
        tmp_path / "a", (0, 8, 64), 2, metrics=("n", "M_over_Q", "anisotropy", *changes)
    )
    page = Page(write_report([sweep]))
    assert "what-20the-20loss-20needs" in {heading.get("id") for heading in page.all("h2")}
    records = pd.concat(pd.read_parquet(path) for path in (sweep / "checkpoints").glob("*.parquet"))
    for key in (*changes, "M_over_Q", "anisotropy"):
        expected = records[records["metric"] == key].pivot(
            index="step", columns="layer", values="value"
        )
        by_layer = pd.read_csv(sweep / "report" / "figures" / "ablation.csv", index_col="layer")
        np.testing.assert_allclose(by_layer[key], expected.loc[64, by_layer.index])
        by_step = pd.read_csv(
            sweep / "report" / "figures" / "ablation-dynamics.csv", index_col="step"
        )
        np.testing.assert_allclose(by_step[key], expected[["block.00", "block.01"]].mean(axis=1))


@pytest.mark.slow
def test_who_writes_the_moments_is_drawn_by_block_and_step(tmp_path: Path) -> None:
    model = gpt_neox(use_parallel_residual=False)
    monitor = StepMonitor(
        model, 1, layers=["blocks", "residual"], folder=tmp_path / "run", metrics=moments
    )
    for step in range(3):
        with monitor.step(step):
            model(**token_batch(seed=step)).logits.sum().backward()
    monitor.close()
    page = Page(write_report([tmp_path / "run"], tmp_path / "out"))
    assert "who-20writes-20it" in {heading.get("id") for heading in page.all("h2")}
    assert "ledger" not in "".join(image["alt"] for image in page.all("img"))
    figures = tmp_path / "out" / "figures"
    for whole in "MV":
        shares = pd.read_csv(figures / f"{whole}-written.csv", index_col="layer")
        assert list(shares.index) == ["block.00", "block.01", "block.02"]
        assert list(shares) == ["stream", "attention", "mlp", "rounding"]
        np.testing.assert_allclose(shares.sum(axis=1), 1)
        over_steps = pd.read_csv(figures / f"{whole}_by_mlp-heatmap.csv", index_col="layer")
        np.testing.assert_allclose(over_steps.iloc[:, -1], shares["mlp"])
    profile = pd.read_csv(figures / "M-profile.csv", index_col="layer")
    assert {"embed", "block.01", "block.01.attention", "block.01.middle", "block.01.mlp"} <= {
        *profile.index
    }
    dynamics = pd.read_csv(figures / "M-dynamics.csv", index_col="step")
    np.testing.assert_allclose(
        dynamics["mlp"], dynamics[[f"block.{i:02}.mlp" for i in range(3)]].mean(axis=1)
    )


@pytest.mark.usefixtures("unpainted")
def test_anchors_are_names_without_what_a_link_has_no_room_for(tmp_path: Path) -> None:
    page = Page(
        write_report([make_sweep(tmp_path / "a", (0, 8), 1, metrics=("n", "M_over_Q", "a~b c"))])
    )
    links = {link["href"] for link in page.all("a")}
    for tag, anchor in (
        ("h2", "at-20a-20glance"),
        ("h3", "metric-M_over_Q"),
        ("h3", "metric-a-7Eb-20c"),
    ):
        assert anchor in {heading.get("id") for heading in page.all(tag)}
        assert f"#{anchor}" in links


@pytest.mark.slow
def test_running_again_in_another_process_gives_the_same_bytes(tmp_path: Path) -> None:
    sweep = make_sweep(
        tmp_path / "a", (0, 8, 64), 1, metrics=("n", "M", "anisotropy_null"), tokens=True
    )
    write_report([sweep])
    before = contents(sweep / "report")
    shutil.rmtree(sweep / "report")
    script = Path(sys.executable).with_name("embedgeo")
    done = subprocess.run(
        [script, "report", sweep], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{sweep / 'report' / 'index.html'}\n"
    after = contents(sweep / "report")
    assert sorted(before) == sorted(after)
    assert [name for name in before if before[name] != after[name]] == []


def test_flags_are_in_plain_words(page: Page) -> None:
    text = " ".join(page.text.split())
    for words in (
        "1 checkpoint could not be measured",
        "step16: FileNotFoundError: <no> config.json",
        "1 of 6 checkpoints have the weights of another one",
        "step1: weights of step0",
        "The loss of 1 checkpoint is out of line",
        "step64: 30 nats per token",
        "block.01: 7 rows at most, at step 512",
        "fewer than 1,000 distinct rows",
        "embed: 900 distinct rows",
        "anisotropy: embed, step 8",
    ):
        assert words in text


HEADLINES = (
    "V_W_over_V_unbiased",
    "M_over_Q",
    "anisotropy",
    "intrinsic_dimension_between",
    "mean_cosine",
)


@pytest.mark.usefixtures("unpainted")
@pytest.mark.slow
def test_five_small_figures_come_first_then_flags(tmp_path: Path) -> None:
    folder = make_sweep(
        tmp_path / "a", metrics=("n", "Q", "norm_cv", *HEADLINES), duplicates={1: 0}
    )
    html = write_report([folder]).read_text()
    glance, _, rest = html.partition('<h2 id="flags">')
    assert re.findall(r'href="figures/([^"]*)\.png"', glance) == [
        f"{metric}-dynamics-small" for metric in HEADLINES
    ]
    assert glance.index("mean_cosine-dynamics-small") < glance.index('class="key"')  # below all
    assert 'class="key"' not in rest
    assert (
        rest.index("Duplicate checkpoints.")
        < rest.index('<h2 id="overview">')
        < rest.index("M_over_Q-dynamics.png")
    )
    assert "max-width: 75ch" not in html


def test_small_figures_are_of_all_runs_or_of_the_layers_of_a_model(tmp_path: Path) -> None:
    training = [make_sweep(tmp_path / name, (0, 8), 1, metrics=("n", *HEADLINES)) for name in "ab"]
    one = make_sweep(tmp_path / "c", (8,), 1, metrics=("n", *HEADLINES))
    for folders, kind in ((training, "compared-dynamics"), ([one], "profile")):
        (title, draw), *_ = plan.page_plan(read_runs(folders), Small(), None)
        ((_, figures),) = draw().groups
        assert (title, [figure.name for figure in figures]) == (
            plan.FIRST,
            [f"{key}-{kind}-small" for key in HEADLINES],
        )


class Small:
    """In place of what saves figures: their sizes are checked."""

    def add(self, data: FigureData, label: str = "") -> plan.PageFigure:
        width, height = data.figure.get_size_inches()
        assert width < 3.3
        assert height < 3.3
        return plan.PageFigure(data.name, "", 0, 0, data.alt, data.text)


@pytest.mark.parametrize("tag", ["train_loss", "train/loss", "loss"])
@pytest.mark.slow
def test_the_training_loss_of_a_monitored_run_stands_beside_its_numbers(
    tmp_path: Path, tag: str
) -> None:
    steps = [0, 1, 2, 4, 8, 16, 32, 64, 100, 200, 300]
    records = [
        {"step": step, "layer": f"block.0{i}", "layer_index": i, "width": 8, "metric": "M_over_Q"}
        | {"value": 0.1 * i + 1 / (1 + step), "stderr": np.nan}
        for step in steps
        for i in range(2)
    ]
    file = HistoryFile(tmp_path / "a")
    for step in steps:
        file.add([record for record in records if record["step"] == step])
    file.close()
    with SummaryWriter(str(tmp_path / "a" / "logs")) as writer:
        for step in range(300):
            writer.add_scalar(tag, 9 - 0.01 * step, step)
            writer.add_scalar("lr", 0.1, step)
    page = Page(write_report([tmp_path / "a"]))
    assert len(page.all("img")) == 2 + 3  # small ones of both; curves, a profile and a heatmap
    numbers = pd.read_csv(
        tmp_path / "a" / "report" / "figures" / "training-loss-small.csv", index_col=0
    )["a"]
    assert numbers.to_dict() == pytest.approx({step: 9 - 0.01 * step for step in range(300)})
    (run,) = read_runs([tmp_path / "a"])
    axes = [
        figures.curves(run, "M_over_Q"),
        figures.dynamics(run, "M_over_Q"),
        figures.heatmap(run, "M_over_Q"),
    ]
    axes += comparison.training_losses([run])
    for data in axes:
        assert data.figure.axes[0].get_xlabel() == "optimizer step (log scale)"


@pytest.mark.usefixtures("unpainted")
def test_of_metrics_that_are_named_alone_there_are_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_sweep(
        tmp_path / "a", (0, 8), 1, metrics=("n", "Q", "M", "V", *HEADLINES), tokens=True
    )
    assert main(["report", str(folder), "--metrics", "M_over_Q,Q"]) == 0
    drawn = {path.stem for path in (folder / "report" / "figures").glob("*.png")}
    kinds = ("dynamics-small", "dynamics", "profile", "heatmap")
    assert drawn == {f"{metric}-{kind}" for metric in ("M_over_Q", "Q") for kind in kinds}
    capsys.readouterr()
    for asked, end in (("anisotropi", "got anisotropi. Did you mean anisotropy?"), ("n", "got n.")):
        assert main(["report", str(folder), "--metrics", asked]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert (
            "metrics must be some of those that have several values at layers, "
            "V_W_over_V_unbiased, " in line
        )
        assert f" and 3 more; {end}" in line


def test_what_is_absent_by_design_is_no_flag(tmp_path: Path) -> None:
    metrics = ("n", "Q", "V", "V_W", "V_on_M_r2", "norm_Q_expected", "cka_to_previous", "my_metric")
    steps = (0, 8, 64)
    changes = {(step, "embed", "V_W"): 0.0 for step in steps} | {
        (step, "embed", "V_on_M_r2"): np.nan for step in steps
    }
    folder = make_sweep(tmp_path / "a", steps, 2, metrics=metrics, changes=changes)
    for step in steps:
        records = SweepFolder(folder).read(f"step{step}")
        of_norm = records["metric"] != "norm_Q_expected"
        kept = records[
            (of_norm | (records["layer"] == "final_norm"))
            & ((step > 0) | (records["metric"] != "cka_to_previous"))
        ]
        SweepFolder(folder).write(f"step{step}", kept)
    (run,) = read_runs([folder])
    assert [flag.details for flag in flags(run) if flag.title == "Missing numbers"] == []
    gaps = {
        (64, "block.00", "V_on_M_r2"),
        (64, "embed", "my_metric"),
        (8, "final_norm", "norm_Q_expected"),
    }
    for step in steps:
        records = SweepFolder(folder).read(f"step{step}")
        at = records[["step", "layer", "metric"]].apply(tuple, axis=1)
        SweepFolder(folder).write(
            f"step{step}", records.assign(value=records["value"].where(~at.isin(gaps)))
        )
    (run,) = read_runs([folder])
    (flag,) = flags(run)
    assert sorted(flag.details) == [
        "Q expected of the norm: final_norm, step 8",
        "R² of V on M: block.00, step 64",
        "my_metric: embed, step 64",
    ]


@pytest.mark.slow
def test_a_clean_run_has_no_flags(tmp_path: Path) -> None:
    make_sweep(tmp_path / "a", metrics=("n", "Q", "M"))
    text = Page(write_report([tmp_path / "a"])).text
    assert "Nothing suspicious" in text
    assert "cases" not in text


def test_the_page_needs_no_network_and_is_small(sweep: Path, page: Page) -> None:
    html = (sweep / "report" / "index.html").read_text()
    assert len(html) < 5_000_000
    assert page.all("script") == [{"type": "application/json", "id": "plots"}, {}]
    outside, _, scripts = html.partition("<script")
    assert "http" not in re.sub(r'src="data:[^"]*"', "", outside)
    # who wrote it, in a comment
    assert re.findall(r"https?://[^ ]*", scripts) == ["https://github.com/leeoniya/uPlot"]
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.all("img"))
    for link in page.all("a"):
        target = link["href"]
        assert (sweep / "report" / target).exists() or target[1:] in {
            t.get("id") for _, t in page.tags
        }, target


def test_the_page_can_be_read_without_eyes_and_mouse(page: Page) -> None:
    assert page.all("html") == [{"lang": "en"}]
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert all(len(image["alt"] or "") > 40 for image in page.all("img"))
    assert len({image["alt"] for image in page.all("img")}) == len(page.all("img"))
    assert all("scope" in cell for cell in page.all("th"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"main", "nav", "header"} <= {tag for tag, _ in page.tags}


@pytest.mark.parametrize("is_dark", [False, True])
def test_text_has_contrast(sweep: Path, page: Page, is_dark: bool) -> None:
    css = (
        (sweep / "report" / "index.html")
        .read_text()
        .partition("<style>")[2]
        .partition("</style>")[0]
    )
    light, dark = css.split("prefers-color-scheme: dark")
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]+)", dark if is_dark else light))

    def luminance(name: str) -> float:
        colour = colours[name]
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for ink in ("ink", "dim", "link"):
        for ground in ("ground", "flag", "fine", "key"):
            darker, lighter = sorted((luminance(ink), luminance(ground)))
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (ink, ground)
    assert not re.findall(r"[ {;]color: #", css)


@pytest.mark.slow
def test_the_overview_shows_the_headlines_and_folds_the_others(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path, (0,), 2, metrics=("n", "M_over_Q", "anisotropy", "V", "Q"))
    html = write_report([folder]).read_text()
    html = html[html.index('id="overview"') :]
    start, end = html.index("<details>"), html.index("</details>")
    named = re.compile(r'<th scope="row">(?:<a[^>]*>)?([^<]*)')
    shown, folded = named.findall(html[:start]), named.findall(html[start:end])
    assert shown[1:] == ["M / Q", "anisotropy"]
    assert folded == ["Q", "V", "rows"]
    assert "<summary>3 more numbers</summary>" in html


@pytest.mark.slow
def test_pictures_beyond_the_budget_are_only_linked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert BUDGET < 5_000_000
    monkeypatch.setattr("embedgeo.report.page.BUDGET", 100_000)
    path = write_report([make_sweep(tmp_path / "a", metrics=("n", "M", "Q"))], tmp_path / "out")
    assert len(path.read_text()) < 260_000  # with the script that draws plots
    assert "Not shown here, to keep this page small" in path.read_text()
    assert 0 < len(Page(path).all("img")) < len(list((tmp_path / "out" / "figures").glob("*.png")))


@pytest.mark.slow
def test_several_runs_are_compared_over_relative_depth(tmp_path: Path) -> None:
    one = make_sweep(tmp_path / "x" / "same", num_blocks=2, metrics=("n", "M_over_Q"))
    two = make_sweep(
        tmp_path / "y" / "same", num_blocks=5, metrics=("n", "M_over_Q"), steps=(0, 4000)
    )
    page = Page(write_report([one, two], tmp_path / "out"))
    assert "same (1)" in page.text
    assert "same (2)" in page.text
    numbers = pd.read_csv(tmp_path / "out" / "figures" / "M_over_Q-compared-profiles.csv")
    assert numbers.groupby("run")["depth"].agg(list).map(
        lambda d: np.round(d, 2).tolist()
    ).tolist() == [
        [0, 0.5, 1],
        [0, 0.2, 0.4, 0.6, 0.8, 1],
    ]
    assert (tmp_path / "out" / "figures" / "same-1-M_over_Q-dynamics.png").exists()


@pytest.mark.slow
def test_the_series_of_one_sweep_are_runs_also_without_its_tensorboard_folder(
    tmp_path: Path,
) -> None:
    series = {step: "seed0" if step < 8 else "seed/1" for step in (0, 1, 8, 64, 512, 4000)}
    folder = make_sweep(tmp_path / "a", metrics=("n", "M"), series=series)
    SweepFolder(folder).rebuild()
    assert {path.name for path in (folder / "tensorboard").iterdir()} == {"seed0", "seed%2F1"}
    write_report([folder])
    before = contents(folder / "report")
    shutil.rmtree(folder / "tensorboard")
    page = Page(write_report([folder]))
    assert contents(folder / "report") == before
    numbers = pd.read_csv(folder / "report" / "figures" / "M-compared-dynamics.csv", index_col=0)
    assert numbers.notna().sum().to_dict() == {"a: seed0": 2, "a: seed%2F1": 4}
    assert "a: seed%2F1" in page.text


def test_widths_are_those_of_the_records(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "a", (0, 1), 1, dim=48, metrics=("n", "norm_cv"))
    for name in ("step0", "step1"):
        records = pd.read_parquet(folder / "checkpoints" / f"{name}.parquet")
        other = records["width"].where(records["layer"] != "embed", 96)
        SweepFolder(folder).write(name, records.assign(width=other))
    (run,) = read_runs([folder])
    assert run.widths.unstack("layer")["embed"].tolist() == [96, 96]
    assert run.widths.unstack("layer")["block.00"].tolist() == [48, 48]
    embed, block = (
        run.baseline["norm_cv"].unstack("layer")[layer] for layer in ("embed", "block.00")
    )
    assert embed[0] == embed[1] < block[0] == block[1]
    assert "48 to 96" in Page(write_report([folder])).text


def test_a_monitored_run_is_read_from_tensorboard_with_repeated_steps_by_last(
    tmp_path: Path,
) -> None:
    # the second run resumes at step 20
    for values in ({0: 1.0, 10: 2.0, 20: 9.0}, {20: 3.0, 30: 4.0}):
        with SummaryWriter(str(tmp_path / "version_0")) as writer:
            for step, value in values.items():
                for i, layer in enumerate(("embed", "block.00", "block.01", "mean")):
                    writer.add_scalar(f"my.prefix.M/{layer}", value + i, step)
                writer.add_scalar("loss", 3.0, step)
    write_report([tmp_path], tmp_path / "out")
    numbers = pd.read_csv(tmp_path / "out" / "figures" / "M-dynamics.csv", index_col="step")
    assert list(numbers) == ["embed", "block.00", "block.01", "mean over blocks", "Gaussian rows"]
    assert numbers["embed"].to_dict() == {0: 1.0, 10: 2.0, 20: 3.0, 30: 4.0}
    (run,) = read_runs([tmp_path])
    assert run.widths.isna().all()  # event files do not hold them


def test_a_monitored_run_is_read_from_its_history(tmp_path: Path) -> None:
    rows = [
        (step, f"layer.{i}", i, 8, "my_metric", float(step - i), np.nan)
        for step in (0, 5)
        for i in range(3)
    ]
    columns = ["step", "layer", "layer_index", "width", "metric", "value", "stderr"]
    pd.DataFrame(rows, columns=columns).to_parquet(tmp_path / "history.parquet")
    page = Page(write_report([tmp_path]))
    assert "my_metric" in page.text
    assert len(page.all("img")) == 4  # a small one, curves, profile, heatmap


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        (
            "step",
            [0, 0.5, 1],
            "must have optimizer steps, whole numbers from 0 up, in the column step; it has 0.5.",
        ),
        (
            "step",
            [0, -8, 1],
            "must have optimizer steps, whole numbers from 0 up, in the column step; it has -8.",
        ),
        ("value", ["1.0", "high", "2.0"], "must have numbers in the column value; it has '1.0'."),
        (
            "step",
            [0, 1, 1],
            "must have one value for each step, layer and metric; it has several of Q at embed, "
            "step 1.",
        ),
    ],
)
def test_a_history_of_other_kinds_of_numbers_is_refused_in_one_sentence(
    column: str,
    values: list[object],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = pd.DataFrame(
        {
            "step": [0, 1, 2],
            "layer": "embed",
            "layer_index": 0,
            "width": 8,
            "metric": "Q",
            "value": 1.0,
        }
    )
    table.assign(stderr=np.nan, **{column: values}).to_parquet(tmp_path / "history.parquet")
    assert main(["report", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert words in line
    assert captured.out == ""
    with pytest.raises(ValueError, match=r"must have") as caught:
        load_results(tmp_path)
    assert words in str(caught.value)


def test_whole_steps_may_be_stored_as_floats(tmp_path: Path) -> None:
    table = pd.DataFrame(
        {
            "step": [0.0, 2.0],
            "layer": "embed",
            "layer_index": 0,
            "width": 8,
            "metric": "Q",
            "value": 1.0,
        }
    )
    table.assign(stderr=np.nan).to_parquet(tmp_path / "history.parquet")
    (run,) = read_runs([tmp_path])
    assert run.steps == [0, 2]


def test_an_encoder_and_its_decoder_are_told_apart(tmp_path: Path) -> None:
    folder = make_sweep(
        tmp_path / "t5", (0, 8), 2, metrics=("n", "M_over_Q"), sides=("encoder.", "decoder.")
    )
    page = Page(write_report([folder]))
    for words in ("t5: encoder mean", "t5: decoder mean"):
        assert words in page.text
    numbers = pd.read_csv(folder / "report" / "figures" / "M_over_Q-compared-profiles.csv")
    assert numbers["run"].unique().tolist() == ["t5, encoder", "t5, decoder"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"steps": (7,)},
        {"num_blocks": 0},
        {"changes": {(step, "block.00", "M"): np.nan for step in (0, 1, 8, 64, 512, 4000)}},
        {"changes": {(8, "embed", "M"): -1.0, (8, "block.00", "M"): np.inf}},
        {"n": 1.0},
        {"steps": range(1000, 1005)},
    ],
)
def test_odd_records_are_drawn_too(options: dict, tmp_path: Path) -> None:
    make_sweep(tmp_path / "a", metrics=("n", "M", "anisotropy", "anisotropy_null"), **options)
    assert Page(write_report([tmp_path / "a"])).all("img")


@pytest.mark.slow
def test_models_of_several_shapes_in_one_folder_are_drawn_apart_and_flagged(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "a", (0, 1, 8), 2, metrics=("n", "M"))
    other = make_sweep(tmp_path / "b", (64, 512), 3, dim=32, metrics=("n", "M"))
    for path in (other / "checkpoints").iterdir():
        shutil.copy(path, folder / "checkpoints")
    large, small = read_runs([folder])
    assert (small.label, small.steps, len(small.blocks["mean over blocks"])) == (
        "a: step 64 wide, 2 deep",
        [0, 1, 8],
        2,
    )
    assert (large.label, large.steps, len(large.blocks["mean over blocks"])) == (
        "a: step 32 wide, 3 deep",
        [64, 512],
        3,
    )
    text = " ".join(Page(write_report([folder])).text.split())
    for words in (
        "Different models.",
        "step 64 wide, 2 deep: step0, step1, step8",
        "step 32 wide, 3 deep: step64, step512",
    ):
        assert words in text


@pytest.mark.slow
def test_two_runs_stand_side_by_side_in_one_table(tmp_path: Path) -> None:
    folders = [make_sweep(tmp_path / name, (0, 1), 1, metrics=("n", "M")) for name in ("x", "y")]
    page = Page(write_report(folders, tmp_path / "out"))
    assert len(page.all("table")) == 3  # how they and what was measured, and their means
    assert [(cell.get("scope"), cell.get("colspan")) for cell in page.all("th")].count(
        ("colgroup", "5")
    ) == 2


def record_settings(folder: Path, **asked: object) -> Path:
    """Write down how a sweep was made, as the command does."""
    asked = {
        "rows": "tokens",
        "seq_len": 256,
        "num_tokens": 4096,
        "dtype": "float32",
        "text_sha256": "0a1b" * 16,
    } | asked
    made = {"model": ["lab/tiny"], "jackknife": len(folder.name), **asked}
    text = {"sha256": asked["text_sha256"], "num_tokens": asked["num_tokens"]}
    versions = {"embedgeo": "0.1.0", "torch": "2.13.0+cpu"}
    manifest = {"asked": made, "text": text, "text_files": ["runs/wiki.txt"], "versions": versions}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.slow
def test_the_head_says_how_each_run_was_measured(tmp_path: Path) -> None:
    folder = record_settings(make_sweep(tmp_path / "a", (0, 1), 1, metrics=("n", "M")))
    os.utime(folder / "checkpoints" / "step1.parquet", (1e9, 1e9))
    os.utime(folder / "checkpoints" / "step0.parquet", (1e9, 1e9))
    text = " ".join(Page(write_report([folder])).text.partition("At a glance")[0].split())
    for words in (
        "lab/tiny",
        "wiki.txt (0a1b0a1b)",
        "tokens",
        "256",
        "4,096",
        "float32",
        "2001-09-09",
    ):
        assert words in text
    assert "embedgeo 0.1.0, torch 2.13.0" in text


def test_the_date_of_a_run_is_recorded_and_not_that_of_a_copy(tmp_path: Path) -> None:
    before = datetime.now(UTC).date()
    for name in ("a", "b"):
        file = HistoryFile(tmp_path / name, origin={"model": "GPT2Model"})
        file.add(
            [
                {
                    "step": 0,
                    "layer": "embed",
                    "layer_index": 0,
                    "width": 8,
                    "metric": "M",
                    "value": 1.0,
                }
            ]
        )
        file.close()
        os.utime(file.path, (1e9, 1e9))
    swept = make_sweep(tmp_path / "c", (0, 1), 1, metrics=("n", "M"))
    for path in swept.glob("checkpoints/*"):
        os.utime(path, (1e9, 1e9))
    today = {before.isoformat(), datetime.now(UTC).date().isoformat()}
    runs = read_runs([tmp_path / name for name in "abc"])
    assert {run.date for run in runs} <= today
    assert all(not run.differences for run in runs)
    manifest = swept / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "date": "2001-02-03"}))
    SweepFolder(swept).open({"model": ["lab/tiny"]}, {})  # goes on another day
    (run,) = read_runs([swept])
    assert run.date == "2001-02-03"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "difference"),
    [
        ({"seq_len": 512}, "sequence length 256 and 512"),
        (
            {"num_tokens": 2048, "dtype": "bfloat16"},
            "tokens 4,096 and 2,048; dtype float32 and bfloat16",
        ),
        ({"text_sha256": "ffff" * 16}, "text 0a1b0a1b and ffffffff"),
        ({"rows": "mean"}, "rows tokens and mean"),
        ({"steps": "log", "token_tables": True}, ""),
    ],
)
@pytest.mark.usefixtures("unpainted")
def test_what_was_measured_otherwise_is_named_first_and_drawn_dashed(
    tmp_path: Path, asked: dict[str, object], difference: str
) -> None:
    folders = [
        make_sweep(tmp_path / name, (0, 1), 1, metrics=("n", "M")) for name in ("a", "bb", "c")
    ]
    for folder, own in zip(folders, ({}, asked, {}), strict=True):
        record_settings(folder, **own)
    text = " ".join(Page(write_report(folders, tmp_path / "out")).text.split())
    runs = read_runs(folders)
    axes = comparison.compare_dynamics(runs, "M").figure.axes[0]
    curves = [line for line in axes.lines if len(line.get_xdata())]
    assert [line.is_dashed() for line in curves] == [False, bool(difference), False]
    if difference:
        sentence = f"These runs are not measured alike: {difference}. The curves of bb are dashed"
        assert 0 < text.index(sentence) < text.index("At a glance")
        first, _, other = difference.split("; ", maxsplit=1)[0].rpartition(" and ")
        named = f"bb, {first.rpartition(' ')[0]} {other} in place of {first.rpartition(' ')[2]}"
        assert named in comparison.compare_profiles(runs, "M").text
    else:
        assert "alike" not in text


@pytest.mark.parametrize("groups", [{}, {"a": "one", "b": "two"}])
def test_the_words_on_runs_not_measured_alike_are_true_of_their_curves(
    tmp_path: Path, groups: dict[str, str]
) -> None:
    folders = [make_sweep(tmp_path / name, (0, 8), 1, metrics=("n", "M")) for name in "ab"]
    for folder, dtype in zip(folders, ("float32", "bfloat16"), strict=True):
        record_settings(folder, dtype=dtype)
    losses = pd.DataFrame({"training_loss": [3.0, 2.0]}, pd.Index([0, 8], name="step"))
    runs = [replace(run, model=losses) for run in read_runs(folders, groups)]
    assert f"The curves of b {'have hollow marks' if groups else 'are dashed'} beside" in apart(
        runs
    )
    for data in (comparison.compare_dynamics(runs, "M"), *comparison.training_losses(runs)):
        assert (
            f"{'Hollow marks' if groups else 'Dashed'}, for not measured like the first run: b, "
            f"dtype" in data.text
        )
        first, other = (line for line in data.figure.axes[0].lines if len(line.get_xdata()))
        assert [line.get_marker() in ("", "None") for line in (first, other)] == [False, False]
        assert first.get_markerfacecolor() == first.get_color()
        assert other.get_markerfacecolor() == "white"
        assert (first.is_dashed(), other.is_dashed()) == (False, True)


def test_small_figures_of_several_runs_say_first_that_they_are_means_over_blocks(
    tmp_path: Path,
) -> None:
    runs = read_runs(
        [
            make_sweep(tmp_path / name, (0, 8), 1, metrics=("n", "V_W_over_V_unbiased"))
            for name in "ab"
        ]
    )
    with style(), mpl.rc_context(SMALL):
        data = comparison.compare_dynamics(runs, "V_W_over_V_unbiased")
    assert any(text.get_text().startswith("mean over blocks") for text in data.figure.texts)


def test_models_of_one_sweep_have_settings_of_their_own(tmp_path: Path) -> None:
    folder = record_settings(
        make_models(tmp_path / "a", {"lab/short": 1, "lab/long": 1}, metrics=("n", "M"))
    )
    manifest = json.loads((folder / "manifest.json").read_text())
    entry = manifest["text"]
    manifest["text"] = {
        "lab/short": entry | {"num_tokens": 1500, "seq_len": 128},
        "lab/long": entry,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    runs = {run.label: run for run in read_runs([folder])}
    lengths = {
        label: (run.settings["seq_len"], run.settings["num_tokens"]) for label, run in runs.items()
    }
    assert lengths == {"short": ("128", "1,500"), "long": ("256", "4,096")}
    assert set(runs["short"].differences_of(runs["long"])) == {"sequence length", "tokens"}


def write_history(folder: Path, value: float) -> None:
    """Write the history of a run anew."""
    file = HistoryFile(folder)
    place = {"layer": "embed", "layer_index": 0, "width": 8, "metric": "Q", "stderr": np.nan}
    for step in (0, 8):
        file.add([{"step": step, "value": value + step, **place}])
    file.close()


@pytest.mark.parametrize("names", [("b", "a"), ("a", "b"), ("a", "a")])
def test_the_training_loss_is_the_last_runs_and_before_it_that_of_the_one_it_goes_on_with(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    write_history(tmp_path, 1.0)
    for name, steps, loss, time in zip(
        names, (range(0, 20, 2), range(5, 12, 2)), (3.0, 2.0), (1e9, 2e9), strict=True
    ):
        with SummaryWriter(str(tmp_path / "logs" / name), filename_suffix=f".{loss}") as writer:
            for step in steps:
                writer.add_scalar("loss", loss, step, walltime=time + step)
    (run,) = read_runs([tmp_path])
    loss = run.model["training_loss"].dropna()
    assert loss.to_dict() == {0: 3.0, 2: 3.0, 4: 3.0, 5: 2.0, 7: 2.0, 9: 2.0, 11: 2.0}


def test_monitored_runs_of_other_numbers_of_rows_are_not_measured_alike(tmp_path: Path) -> None:
    for name, n in (("a", 512), ("b", 4096), ("c", 530)):
        file = HistoryFile(tmp_path / name, origin={"model": "GPT2Model", "dtype": "float32"})
        values = {"n": float(n), "M": 1.0}
        place = {"layer_index": 0, "width": 8, "stderr": np.nan}
        for step in (0, 1):
            file.add(
                [
                    {"step": step, "layer": "embed", "metric": key, "value": values[key], **place}
                    for key in values
                ]
            )
        file.close()
    a, b, c = read_runs([tmp_path / name for name in "abc"])
    assert (a.differences, b.differences, c.differences) == (
        {},
        {"number of rows": ("512", "4096")},
        {},
    )
    assert origins([a, b, c]).loc["b", ["model", "dtype"]].tolist() == ["GPT2Model", "float32"]


@pytest.mark.slow
def test_standard_errors_are_in_the_table_the_records_and_the_key(tmp_path: Path) -> None:
    changes = {(step, f"block.0{i}", "M"): 2.0 + step for step in (0, 8) for i in range(2)}
    folder = make_sweep(tmp_path / "a", (0, 8), 2, metrics=("n", "M"), changes=changes, stderr=0.05)
    path = write_report([folder])
    cells = re.findall(r"<td>([^<]*±[^<]*)</td>", path.read_text())
    assert cells[:4] == ["2.00 ± 0.10", "2.00 ± 0.10 (0)", "10.00 ± 0.50 (8)", "10.00 ± 0.50"]
    text = Page(path).text
    assert "One standard error to each side of the line." in text
    assert "± one standard error." in text
    records = pd.read_csv(folder / "report" / "metrics.csv")
    assert list(records) == ["run", "step", "layer", "metric", "value", "stderr", "gaussian"]
    at = records[records["layer"] != "model"]
    np.testing.assert_allclose(at["stderr"], 0.05 * at["value"])
    assert records[records["layer"] == "model"]["stderr"].isna().all()
    both = Page(write_report([folder, folder], tmp_path / "out"))
    assert [(cell.get("scope"), cell.get("colspan")) for cell in both.all("th")].count(
        ("colgroup", "2")
    ) == 2


def test_without_standard_errors_the_page_does_not_speak_of_them(page: Page) -> None:
    assert "±" not in page.text
    assert "tandard error" not in page.text


@pytest.mark.slow
def test_few_token_types_in_the_regressions_are_flagged(tmp_path: Path) -> None:
    few = {
        (step, f"block.0{i}", "token_types_regressed"): 299.0 + i
        for step in (0, 8)
        for i in range(2)
    }
    few |= {
        (step, layer, "token_types_regressed"): 400.0
        for step in (0, 8)
        for layer in ("embed", "final_norm")
    }
    folder = make_sweep(
        tmp_path / "a", (0, 8), 2, metrics=("n", "M", "token_types_regressed"), changes=few
    )
    text = " ".join(Page(write_report([folder])).text.split())
    assert (
        "Few token types in the regressions. The C.V. of Q, the slopes and the R² over token types "
        "rest on" in text
    )
    assert "1 caseblock.00: 299 token types" in text


def test_what_few_token_types_leave_undefined_has_one_flag(tmp_path: Path) -> None:
    changes = {
        (step, layer, "token_types_regressed"): 1.0 for step in (0, 8) for layer in layer_names(2)
    }
    changes |= {(*place[:2], "V_freq_r2"): np.nan for place in changes}
    folder = make_sweep(
        tmp_path / "a",
        (0, 8),
        2,
        metrics=("n", "token_types_regressed", "V_freq_r2"),
        changes=changes,
    )
    (run,) = read_runs([folder])
    assert [flag.title for flag in flags(run)] == ["Few token types in the regressions"]


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1])
def test_near_copies_are_flagged_where_they_move_the_intrinsic_dimension(
    tmp_path: Path, share: float
) -> None:
    rows, copies = torch.randn(2, 4000, 10, generator=torch.Generator().manual_seed(0))
    num_copies = int(4000 * share)
    rows[4000 - num_copies :] = rows[:num_copies] + 1e-3 * copies[:num_copies]
    metric = IntrinsicDimension(10)
    metric.update(rows)
    values = {key: float(value) for key, value in metric.compute().items()}
    changes = {(step, "block.01", key): value for step in (0, 8) for key, value in values.items()}
    usual = {"intrinsic_dimension": 9.0, "intrinsic_dimension_next_scale": 9.5, "n_points": 4000.0}
    changes |= {
        (step, layer, key): value
        for step in (0, 8)
        for layer in ("embed", "block.00", "final_norm")
        for key, value in usual.items()
    }
    changes[8, "block.01", "intrinsic_dimension"] = 9.0
    changes[8, "block.01", "intrinsic_dimension_next_scale"] = 9.5
    (run,) = read_runs(
        [make_sweep(tmp_path / "a", (0, 8), 2, metrics=("n", *usual), changes=changes)]
    )
    found = [
        flag.details
        for flag in flags(run)
        if flag.title == "Near copies in the intrinsic dimension"
    ]
    assert len(found) == (share == 0.1)
    if found:
        assert re.fullmatch(
            r"block.01: 0\.3\d*, and \d\.\d+ at the next scale at step 0", found[0][0]
        )
        assert len(found[0]) == 1


@pytest.mark.slow
def test_plain_text_has_no_flag_of_near_copies_once_a_model_is_trained(tmp_path: Path) -> None:
    words = re.findall(r"\w+|[^\w\s]|\s+", "\n".join(topics.values()))
    known = {word: i for i, (word, _) in enumerate(Counter(words).most_common(1999))}
    ids = torch.tensor([known.get(word, 1999) for word in words])
    torch.manual_seed(0)
    model = gpt2(vocab_size=2000, n_positions=64, n_embd=64)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def measure(step: int) -> None:
        with torch.no_grad(), observe(model.eval()) as geometry:
            for batch in ids[: 64 * 64].view(8, 8, 64):
                model(input_ids=batch)
        geometry.save(tmp_path / "a", model="gpt2", step=step)
        model.train()

    measure(0)
    for starts in torch.randint(0, len(ids) - 64, (100, 16)).tolist():
        batch = torch.stack([ids[start : start + 64] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    measure(100)
    (run,) = read_runs([tmp_path / "a"])
    (flag,) = [
        flag for flag in flags(run) if flag.title == "Near copies in the intrinsic dimension"
    ]
    # random: a token in one place is a near copy
    assert {line.split(":")[0] for line in flag.details} >= {"block.00"}
    assert all(line.endswith(" at step 0") for line in flag.details)


def test_backticks_are_code(tmp_path: Path) -> None:
    make_sweep(tmp_path / "a", (0, 1), 1, metrics=("n", "duplicate_fraction"))
    page = write_report([tmp_path / "a"]).read_text()
    assert "<code>embed</code>" in page
    assert "`" not in page.partition("<script")[0]


FAULTS = {
    "a failure": (ZeroDivisionError("x"), ZeroDivisionError, "x"),
    "Ctrl-C": (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    "a full disk": (
        OSError(ENOSPC, "No space left on device"),
        OSError,
        r"is not \(No space left on device\)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    ["embedgeo.report.write_page", "embedgeo.report.figures.profile", "pyarrow.csv.write_csv"],
)
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_ends_it_the_earlier_report_stays(
    fault: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sweep(tmp_path / "a", (0, 1), 1, metrics=("n", "M"))
    raised, expected, words = FAULTS[fault]

    def broken(*_: object) -> None:
        raise raised

    def fails() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(moment, broken)
            with pytest.raises(expected, match=words):
                write_report([tmp_path / "a"])

    fails()
    assert not (tmp_path / "a" / "report").exists()
    write_report([tmp_path / "a"])
    (tmp_path / "a" / "report" / "mine.txt").write_text("kept")
    before = contents(tmp_path / "a")
    fails()
    assert contents(tmp_path / "a") == before
    (tmp_path / "a" / "report" / "figures" / "old.png").touch()
    write_report([tmp_path / "a"])
    assert contents(tmp_path / "a") == before


@pytest.mark.slow
def test_a_failure_while_the_new_report_takes_its_place_brings_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sweep(tmp_path / "a", (0, 1), 1, metrics=("n", "M"))
    write_report([tmp_path / "a"])
    before = contents(tmp_path / "a")
    make_sweep(tmp_path / "b", (0, 1, 2), 1, metrics=("n", "M"))
    rename = Path.rename

    def stopped(path: Path, target: Path) -> Path:
        if path.name == "metrics.csv" and "old" not in (path.parent.name, target.parent.name):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_report([tmp_path / "b"], tmp_path / "a" / "report")
    assert contents(tmp_path / "a") == before


@pytest.mark.slow
def test_a_report_that_is_killed_leaves_the_earlier_one_and_the_next_one_cleans_up(
    tmp_path: Path,
) -> None:
    folder = make_sweep(tmp_path / "a", (0, 1), 1, metrics=("n", "M"))
    script = (
        "import os, sys, embedgeo.report as r; r.write_page = lambda *_: os.kill(os.getpid(), 9); "
    )
    script += "r.write_report([__import__('pathlib').Path(sys.argv[1])])"

    def killed() -> None:
        done = subprocess.run(
            [sys.executable, "-c", script, folder], capture_output=True, timeout=200, check=False
        )
        assert done.returncode == -9

    killed()
    write_report([folder])  # what was left is not taken for somebody else's
    before = contents(folder / "report")
    killed()
    assert {
        name: content for name, content in contents(folder / "report").items() if name in before
    } == before
    assert contents(folder / "report") != before
    write_report([folder])
    assert contents(folder / "report") == before


@pytest.mark.slow
def test_a_terminal_has_a_bar_and_a_file_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_sweep(tmp_path / "a", (0, 1), 1, metrics=("n", "M"))
    write_report([folder])
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    write_report([folder])
    assert "Drawing figures" in capsys.readouterr().err


def bad_folders(tmp_path: Path) -> dict[str, list[str]]:
    good = make_sweep(tmp_path / "good", steps=(0, 1), metrics=("n", "M"))
    corrupt = make_sweep(tmp_path / "corrupt", steps=(0, 1), metrics=("n", "M"))
    (corrupt / "checkpoints" / "step1.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "columns").mkdir()
    pd.DataFrame({"step": [1]}).to_parquet(tmp_path / "columns" / "history.parquet")
    older = make_sweep(tmp_path / "older", steps=(0, 1), metrics=("n", "M"))
    for path in (older / "checkpoints").iterdir():
        pd.read_parquet(path).drop(columns=["width", "series", "stderr"]).to_parquet(path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    (tmp_path / "file").touch()
    return {
        "folders of runs": [str(tmp_path / "nosuch")],
        "none": [str(tmp_path / "file")],
        "no measurements": [str(tmp_path / "empty")],
        "measurements of these kinds": [
            str(good),
            str(tmp_path / "other"),
            "--out",
            str(tmp_path / "new"),
        ],
        "step1.parquet must be a Parquet file": [str(corrupt)],
        "layer_index, width, metric, value, stderr missing": [str(tmp_path / "columns")],
        "series, width, stderr missing. Was it written by another version of embedgeo?": [
            str(older)
        ],
        "holds something else": [str(good), "--out", str(tmp_path / "other")],
        "can be written": [str(good), "--out", str(tmp_path / "file" / "out")],
        "required": [],
    }


@pytest.mark.parametrize("case", range(10))
def test_bad_input_gives_one_line_and_status_2(
    case: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, arguments = list(bad_folders(tmp_path).items())[case]
    before = sorted(tmp_path.rglob("*"))
    try:
        status = main(["report", *arguments])
    except SystemExit as stopped:
        status = stopped.code
    captured = capsys.readouterr()
    assert status == 2
    (line,) = captured.err.splitlines()
    assert line.startswith("embedgeo: error: ")
    assert words in line
    assert captured.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_a_report_of_several_folders_leaves_their_own_reports_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [make_sweep(tmp_path / name, (0, 1), 1, metrics=("n", "M")) for name in ("a", "b")]
    write_report(folders[:1])
    before = contents(tmp_path)
    assert main(["report", *map(str, folders)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    got = ", ".join(map(str, folders))
    assert line.endswith(
        f"a report of several folders needs a folder of its own; got {got} without one. Give --out "
        f"FOLDER."
    )
    assert contents(tmp_path) == before


@pytest.mark.usefixtures("unpainted")
def test_a_report_of_an_earlier_history_leaves_that_of_the_folder_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in (1.0, 2.0):
        write_history(tmp_path / "a", value)
    write_report([tmp_path / "a"])
    before = contents(tmp_path)
    earlier = str(tmp_path / "a" / "history.1.parquet")
    assert main(["report", earlier]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        f"a report of a history itself needs a folder of its own; got {earlier} without one. Give "
        f"--out FOLDER."
    )
    assert contents(tmp_path) == before
    assert main(["report", earlier, "--out", str(tmp_path / "earlier")]) == 0
    assert pd.read_csv(tmp_path / "earlier" / "metrics.csv")["value"].max() == 1 + 8


@pytest.mark.slow
def test_options_may_stand_before_and_after_the_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(make_sweep(tmp_path / "a", steps=(0, 1), metrics=("n", "M")))
    for out, arguments in (
        ("x", ["--out", "x", folder]),
        ("y", [folder, "--out=y"]),
        ("z", [folder]),
    ):
        placed = [
            str(tmp_path / a) if a in "xyz" else a.replace("=y", f"={tmp_path / 'y'}")
            for a in arguments
        ]
        assert main(["report", *placed]) == 0
        assert (Path(capsys.readouterr().out.strip()).parent.name) == (
            "report" if out == "z" else out
        )


@pytest.mark.slow
@pytest.mark.skipif(
    CHROMIUM is None, reason="needs a browser, and chromium was not found: apt-get install chromium"
)
def test_a_browser_shows_all_pictures_without_errors_or_overflow(
    sweep: Path, page: Page, tmp_path: Path
) -> None:
    check = (
        "<script>document.title = JSON.stringify([[...document.images].filter(i => i.naturalWidth "
        "> 0).length,"
        "document.documentElement.scrollWidth <= innerWidth])</script>"
    )
    html = (sweep / "report" / "index.html").read_text()
    (tmp_path / "page.html").write_text(html.replace("</body>", f"{check}</body>"))
    flags = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
        "--disable-sync"
    )
    for width in (1280, 600):
        done = subprocess.run(
            [
                *(
                    CHROMIUM,
                    *flags.split(),
                    "--enable-logging=stderr",
                    f"--window-size={width},900",
                    "--dump-dom",
                ),
                *(f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'page.html'}"),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert "CONSOLE" not in done.stderr
        assert f"<title>[{len(page.all('img'))},true]</title>" in done.stdout


@pytest.mark.slow
def test_of_very_many_metrics_all_but_the_headlines_have_one_figure(tmp_path) -> None:
    others = [f"own_{i}" for i in range(40)]
    folder = make_sweep(tmp_path / "a", (0, 8), 1, metrics=("n", "mean_cosine", "Q", *others))
    panels = plan.page_plan(read_runs([folder]), Drawn(), None)
    drawn = {figure for _, draw in panels for _, figures in draw().groups for figure in figures}
    assert {
        "mean_cosine-dynamics",
        "mean_cosine-profile",
        "mean_cosine-heatmap",
        "Q-dynamics",
    } <= drawn
    assert {"Q-profile", "Q-heatmap"}.isdisjoint(drawn)


def test_a_figure_in_short_has_no_bar_and_few_ticks(sweep: Path) -> None:
    (run,) = read_runs([sweep])
    in_full, in_short = (figures.dynamics(run, "Q", has_bar=has_bar) for has_bar in (True, False))
    assert [len(data.figure.axes) for data in (in_full, in_short)] == [2, 1]
    assert len(in_short.figure.axes[0].get_yticks()) <= 4
    assert in_short.text.startswith(in_full.text)
    assert "violet, the first layer" in in_short.text


class Drawn:
    """In place of what saves figures: their names."""

    def add(self, data, label=""):
        return data.name


def test_a_table_is_what_unstacking_gives(tmp_path):
    (run,) = read_runs([make_sweep(tmp_path / "sweep", (0, 1, 8), 2, metrics=("n", "Q", "M"))])
    run = replace(run, values=run.values.iloc[[3, 0, 2, 5]], layers=run.layers[::-1])
    expected = run.values["Q"].unstack("layer").reindex(columns=run.layers).sort_index()
    pd.testing.assert_frame_equal(run.table("Q"), expected)
    assert run.table("Q").isna().to_numpy().any()
