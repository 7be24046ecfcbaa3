"""The command `embedgeo report`: one page, its figures and their numbers."""

import json
import re
import subprocess
import sys
from errno import ENOSPC
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from embedgeo import IntrinsicDimension, StepMonitor, TokenMoments, load_results
from embedgeo.cli import main
from embedgeo.glossary import headlines, term
from embedgeo.report import write_report
from embedgeo.report.runs import Run, read_runs, runs_of_records
from embedgeo.report.summary import flags, num_regressed, origins, overview
from embedgeo.results.folder import SweepFolder
from embedgeo.results.parquet import HistoryFile
from tests.files import contents
from tests.models import gpt_neox, token_batch
from tests.records import layer_records
from tests.report.page import Page, report
from tests.report.synthetic import (
    ABLATIONS,
    EVERYTHING,
    layer_names,
    make_models,
    make_sweep,
)
from tests.training.runs import moments

KINDS = ("dynamics", "profile", "heatmap")
PARTS = {
    "composition": ("decomposition", "decomposition-dynamics"),
    "intrinsic-20dimension-20over-20scales": (
        "intrinsic-dimension-scales",
        "intrinsic-dimension-scales-by-step",
    ),
    "what-20the-20loss-20needs": ("ablation",),
    "loss": ("loss",),
    "spectrum": ("spectra", "spectra-steps"),
    "token-20types": ("tokens-V-against-M", "tokens-histograms"),
    "outlier-20coordinates": ("massive-activations",),
}
"""Sections with figures of several metrics together."""


def test_every_part_and_metric_of_a_sweep_has_its_figures_and_their_numbers(page: Page) -> None:
    for section, names in PARTS.items():
        assert section in page.headings
        assert {*names} <= page.figures, section
    drawn = {"Q", "M", "V", "M_over_Q", "anisotropy", "intrinsic_dimension", "a-b-c", *ABLATIONS}
    assert {f"{metric}-{kind}" for metric in drawn for kind in KINDS} <= page.figures
    of_parts = re.compile("intrinsic_dimension_at|max_abs_|massive_fraction")
    assert not [name for name in page.figures if of_parts.match(name)]
    files = {path.name for path in (page.folder / "figures").iterdir()}
    ends = ("png", "svg", "csv")
    assert files == {f"{name}.{end}" for name in page.figures for end in ends}
    assert len(page.all("img")) == len(page.figures)


def test_numbers_are_those_of_the_records(sweep: Path, page: Page) -> None:
    records = pd.concat(pd.read_parquet(path) for path in (sweep / "checkpoints").glob("*.parquet"))
    by_metric = records.set_index(["metric", "step", "layer"])["value"]
    blocks = [f"block.0{i}" for i in range(3)]
    expected = by_metric["M"].unstack("layer")
    dynamics = page.numbers("M-dynamics", "step")
    pd.testing.assert_frame_equal(dynamics[expected.columns], expected, check_names=False)
    np.testing.assert_allclose(dynamics["mean over blocks"], expected[blocks].mean(axis=1))
    profile = page.numbers("M-profile", "layer")
    np.testing.assert_allclose(profile["4000"], expected.loc[4000, profile.index], rtol=1e-14)
    by_layer = page.numbers("ablation", "layer")
    for key in (*ABLATIONS, "M_over_Q", "anisotropy"):
        table = by_metric[key].unstack("layer")
        np.testing.assert_allclose(by_layer[key], table.loc[4000, by_layer.index])
    everything = pd.read_csv(page.folder / "metrics.csv")
    columns = ["run", "step", "layer", "metric", "value", "stderr", "gaussian"]
    assert list(everything) == columns
    assert len(everything) == records["value"].notna().sum()
    assert set(everything["metric"]) == {*EVERYTHING, "loss"}
    of_layers = everything[everything["layer"] != "model"]
    np.testing.assert_allclose(of_layers["stderr"], 0.05 * of_layers["value"].abs())
    at = of_layers.set_index(["step", "layer", "metric"]).loc[(64, "block.00")]
    assert at.loc["M", "value"] == pytest.approx(expected.loc[64, "block.00"], rel=1e-14)
    assert at.loc["M", "gaussian"] == pytest.approx(at.loc["Q", "value"] / 65_536)
    assert at.loc["cka_to_first", "gaussian"] == 0


def test_flags_are_in_plain_words(page: Page) -> None:
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
        assert words in page.text


def test_small_figures_come_first_then_flags_then_the_headlines_and_the_others_folded(
    page: Page,
) -> None:
    glance, _, rest = page.html.partition('<h2 id="flags">')
    small = re.findall(r'href="figures/([^"]*)\.png"', glance)
    assert small
    assert all(name.endswith("-dynamics-small") for name in small)
    assert glance.index(small[-1]) < glance.index('class="key"')  # below all
    assert rest.index("Duplicate checkpoints.") < rest.index('<h2 id="overview">')
    overview = rest[rest.index('<h2 id="overview">') :]
    assert overview.index("M_over_Q-dynamics.png") > 0
    shown, _, folded = overview.partition("<details>")
    named = re.compile(r'<th scope="row"><a href="#metric-([^"]*)"')
    assert {*named.findall(shown)} == {*headlines()} & {*EVERYTHING}
    assert "a-7Eb-20c" in named.findall(folded.partition("</details>")[0])


def test_standard_errors_are_told_where_there_are_some(page: Page, plain: Path) -> None:
    cells = re.findall(r"<td>([^<]*±[^<]*)</td>", page.html)
    assert re.fullmatch(r"[\d.]+ ± [\d.]+", cells[0])
    assert "One standard error to each side of the line." in page.text
    without = report(plain)
    assert "Nothing suspicious" in without.text
    assert not re.search("±|tandard error|cases", without.text)


def test_the_page_needs_no_network_and_its_links_lead_somewhere(page: Page) -> None:
    assert len(page.html) < 5_000_000
    assert page.all("script") == [{"type": "application/json", "id": "plots"}, {}]
    outside, _, scripts = page.html.partition("<script")
    assert "http" not in re.sub(r'src="data:[^"]*"', "", outside)
    # who wrote it, in a comment
    assert re.findall(r"https?://[^ ]*", scripts) == ["https://github.com/leeoniya/uPlot"]
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert {"at-20a-20glance", "metric-M_over_Q", "metric-a-7Eb-20c"} <= ids
    for link in page.all("a"):
        target = link["href"]
        assert (page.folder / target).exists() or target[1:] in ids, target
    assert "`" not in page.html.partition("<script")[0]


def test_the_page_can_be_read_without_eyes_and_mouse(page: Page) -> None:
    assert page.all("html") == [{"lang": "en"}]
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    alts = [image["alt"] or "" for image in page.all("img")]
    assert all(len(alt) > 40 for alt in alts)
    assert len({*alts}) == len(alts)
    assert all("scope" in cell for cell in page.all("th"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"main", "nav", "header"} <= {tag for tag, _ in page.tags}


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_has_contrast(page: Page, scheme: int) -> None:
    css = page.html.partition("<style>")[2].partition("</style>")[0]
    of_scheme = css.split("prefers-color-scheme: dark")[scheme]
    colours = dict(re.findall(r"--(\w+): #([0-9a-f]+)", of_scheme))

    def luminance(name: str) -> float:
        colour = colours[name]
        digits = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
        channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for ink in ("ink", "dim", "link"):
        for ground in ("ground", "flag", "fine", "key"):
            darker, lighter = sorted((luminance(ink), luminance(ground)))
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (ink, ground)


def test_page_and_terminal_open_with_what_happened(
    sweep: Path, page: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(sweep, out=tmp_path / "out", metrics=["M_over_Q"])
    said = capsys.readouterr().err.splitlines()
    assert page.text.index("What happened") < page.text.index("At a glance")
    for name in ("M / Q", "anisotropy"):
        (sentence,) = [line for line in said if line.startswith(name)]
        assert sentence in page.text


@pytest.mark.slow
def test_running_again_in_another_process_gives_the_same_bytes(plain: Path, tmp_path: Path) -> None:
    page = Page(write_report([plain], tmp_path / "here"))
    assert all(image["src"].startswith("data:image/png;base64,iVBOR") for image in page.all("img"))
    for path in (tmp_path / "here" / "figures").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    script = Path(sys.executable).with_name("embedgeo")
    command = [script, "report", plain, f"--out={tmp_path / 'there'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if not line.startswith("drawing ")] == []
    assert done.stdout == f"{tmp_path / 'there' / 'index.html'}\n"
    assert contents(tmp_path / "here") == contents(tmp_path / "there")


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
    page = report(tmp_path / "run")
    assert "who-20writes-20it" in page.headings
    for whole in "MV":
        shares = page.numbers(f"{whole}-written", "layer")
        assert list(shares.index) == ["block.00", "block.01", "block.02"]
        assert list(shares) == ["stream", "attention", "mlp", "rounding"]
        np.testing.assert_allclose(shares.sum(axis=1), 1)
        over_steps = page.numbers(f"{whole}_by_mlp-heatmap", "layer")
        np.testing.assert_allclose(over_steps.iloc[:, -1], shares["mlp"])
    assert {"embed", "block.01", "block.01.middle"} <= {*page.numbers("M-profile", "layer").index}


def test_no_metrics_are_not_all_metrics(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(sweep), "--metrics", ""]) == 2
    assert "metrics must be keys, as M_over_Q,anisotropy; got none." in capsys.readouterr().err


def test_of_metrics_that_are_named_alone_there_are_figures(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], unpainted: None
) -> None:
    out = tmp_path / "out"
    assert main(["report", str(sweep), "--metrics", "M_over_Q,Q", f"--out={out}"]) == 0
    kinds = ("dynamics-small", *KINDS)
    expected = {f"{metric}-{kind}" for metric in ("M_over_Q", "Q") for kind in kinds}
    assert Page(out / "index.html").figures == expected
    capsys.readouterr()
    for asked, end in (("anisotropi", "got anisotropi. Did you mean anisotropy?"), ("n", "got n.")):
        assert main(["report", str(sweep), "--metrics", asked]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "metrics must be some of those that have several values at layers, " in line
        assert line.endswith(end)


def test_several_runs_are_compared_over_relative_depth_side_by_side(tmp_path: Path) -> None:
    metrics = ("n", "M_over_Q")
    one = make_sweep(tmp_path / "x" / "same", num_blocks=2, metrics=metrics)
    two = make_sweep(tmp_path / "y" / "same", num_blocks=5, metrics=metrics, steps=(0, 4000))
    page = report(one, two, out=tmp_path / "out")
    assert "same (1)" in page.text
    assert "same (2)" in page.text
    depths = page.numbers("M_over_Q-compared-profiles").groupby("run")["depth"].agg(list)
    assert depths.map(lambda d: np.round(d, 2).tolist()).tolist() == [
        [0, 0.5, 1],
        [0, 0.2, 0.4, 0.6, 0.8, 1],
    ]
    assert "same-1-M_over_Q-dynamics" in page.figures
    parts = [cell["colspan"] for cell in page.all("th") if cell.get("scope") == "colgroup"]
    assert len({*parts}) == 1


def test_an_encoder_and_its_decoder_are_told_apart(tmp_path: Path) -> None:
    sides = ("encoder.", "decoder.")
    page = report(make_sweep(tmp_path / "t5", (0, 8), 2, metrics=("n", "M_over_Q"), sides=sides))
    for words in ("t5: encoder mean", "t5: decoder mean"):
        assert words in page.text
    runs = page.numbers("M_over_Q-compared-profiles")["run"].unique().tolist()
    assert runs == ["t5, encoder", "t5, decoder"]


def write_history(folder: Path, value: float = 1.0, n: float = 512.0, **options: object) -> Path:
    """Write the history of a run of steps 0 and 8 anew."""
    file = HistoryFile(folder, **options)
    for step in (0, 8):
        layers = ("embed", "block.00", "block.01")
        file.add(
            [
                *layer_records(step, value + step, layers=layers, metrics=["my_metric"]),
                *layer_records(step, n, layers=layers, metrics=["n"]),
            ]
        )
    file.close()
    return file.path


@pytest.mark.parametrize("names", [("b", "a"), ("a", "a")])
def test_a_monitored_run_is_read_from_its_history_and_its_loss_from_the_loggers_events(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    """The loss is the last run's, and before it that of the run it goes on with."""
    write_history(tmp_path)
    parts = zip(names, (range(0, 20, 2), range(5, 12, 2)), (3.0, 2.0), (1e9, 2e9), strict=True)
    for name, steps, loss, time in parts:
        with SummaryWriter(str(tmp_path / "logs" / name), filename_suffix=f".{loss}") as writer:
            for step in steps:
                writer.add_scalar("train/loss", loss, step, walltime=time + step)
                writer.add_scalar("lr", 0.1, step)
    page = report(tmp_path)
    kinds = ("dynamics-small", *KINDS)
    assert page.figures == {"training-loss-small", *(f"my_metric-{kind}" for kind in kinds)}
    loss = page.numbers("training-loss-small", "step").iloc[:, 0]
    assert loss.to_dict() == {0: 3.0, 2: 3.0, 4: 3.0, 5: 2.0, 7: 2.0, 9: 2.0, 11: 2.0}


def test_a_monitored_run_is_read_from_tensorboard_with_repeated_steps_by_last(
    tmp_path: Path,
) -> None:
    # the second run resumes at step 20
    for values in ({0: 1.0, 10: 2.0, 20: 9.0}, {20: 3.0, 30: 4.0}):
        with SummaryWriter(str(tmp_path / "version_0")) as writer:
            for step, value in values.items():
                for i, layer in enumerate(("embed", "block.00", "block.01", "mean")):
                    writer.add_scalar(f"my.prefix.M/{layer}", value + i, step)
    (run,) = read_runs([tmp_path])
    assert run.layers == ["embed", "block.00", "block.01"]
    assert run.table("M")["embed"].to_dict() == {0: 1.0, 10: 2.0, 20: 3.0, 30: 4.0}
    assert run.widths.isna().all()  # event files do not hold them


OTHERS = "must have columns of records; it has others ("


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("step", [0, 0.5, 1], f"{OTHERS}Float value 0.500000 was truncated"),
        ("value", ["1.0", "high", "2.0"], f"{OTHERS}Failed to parse string: 'high'"),
        ("step", [0.0, 2.0, 4.0], ""),
    ],
)
def test_a_history_of_other_kinds_of_numbers_is_refused_in_one_sentence(
    column: str, values: list, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [record for step in range(3) for record in layer_records(step, metrics=["Q"])]
    table = pd.DataFrame(records).query("layer == 'embed'").assign(**{column: values})
    table.to_parquet(tmp_path / "history.parquet")
    if not words:
        assert load_results(tmp_path)["step"].tolist() == values
        return
    assert main(["report", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    assert words in line
    with pytest.raises(ValueError, match=re.escape(words)):
        load_results(tmp_path)


def record_settings(folder: Path, **asked: object) -> Path:
    """Write down how a sweep was made, as the command does."""
    settings = {"rows": "tokens", "seq_len": 256, "num_tokens": 4096, "dtype": "float32"}
    settings |= {"text_sha256": "0a1b" * 16, **asked}
    text = {"sha256": settings["text_sha256"], "num_tokens": settings["num_tokens"]}
    manifest = {
        "asked": {"model": ["lab/tiny"], "jackknife": len(folder.name), **settings},
        "text": text,
        "text_files": ["runs/wiki.txt"],
        "versions": {"embedgeo": "0.1.0", "torch": "2.13.0+cpu"},
        "date": "2001-02-03",
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_the_head_says_how_runs_were_measured_and_which_not_like_the_first(
    tmp_path: Path,
) -> None:
    a, b = (
        record_settings(make_sweep(tmp_path / name, (0, 1), 1, metrics=("n", "M")), **asked)
        for name, asked in (("a", {}), ("bb", {"num_tokens": 2048, "dtype": "bfloat16"}))
    )
    SweepFolder(a).open(json.loads((a / "manifest.json").read_text())["asked"], {})  # another day
    page = report(a, b, out=tmp_path / "out")
    head = page.text.partition("At a glance")[0]
    for words in ("lab/tiny", "wiki.txt (0a1b0a1b)", "256", "4,096", "float32", "2001-02-03"):
        assert words in head
    assert "embedgeo 0.1.0, torch 2.13.0" in head
    difference = "tokens 4,096 and 2,048; dtype float32 and bfloat16"
    assert f"not measured alike: {difference}. Compare the curves of bb with" in head


def test_models_of_one_sweep_have_settings_of_their_own(tmp_path: Path) -> None:
    folder = record_settings(
        make_models(tmp_path / "a", {"lab/short": 1, "lab/long": 1}, metrics=("n", "M"))
    )
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    long = manifest["text"]
    short = long | {"num_tokens": 1500, "seq_len": 128}
    path.write_text(json.dumps(manifest | {"text": {"lab/short": short, "lab/long": long}}))
    runs = {run.label: run for run in read_runs([folder])}
    assert (runs["short"].settings["seq_len"], runs["long"].settings["seq_len"]) == ("128", "256")
    assert set(runs["short"].differences_of(runs["long"])) == {"sequence length", "tokens"}


def test_monitored_runs_of_other_numbers_of_rows_are_not_measured_alike(tmp_path: Path) -> None:
    for name, n in (("a", 512.0), ("b", 4096.0), ("c", 530.0)):
        write_history(tmp_path / name, n=n, origin={"model": "GPT2Model", "dtype": "float32"})
    runs = read_runs([tmp_path / name for name in "abc"])
    rows = {"number of rows": ("512", "4096")}
    assert [run.differences for run in runs] == [{}, rows, {}]
    assert origins(runs).loc["b", ["model", "dtype"]].tolist() == ["GPT2Model", "float32"]


def test_a_run_without_massive_rows_is_not_measured_like_one_with_all(tmp_path: Path) -> None:
    for name, origin in (("all", {}), ("some", {"skip_massive": "4.0"})):
        write_history(tmp_path / name, origin={"dtype": "float32", **origin})
    (_, some) = read_runs([tmp_path / name for name in ("all", "some")])
    assert some.differences == {"skip massive": ("0.0", "4.0")}


def raised(folder: Path) -> dict[str, list[str]]:
    """The flags of a run and their cases."""
    (run,) = read_runs([folder])
    return {flag.title: flag.details for flag in flags(run)}


def test_what_is_absent_by_design_is_no_flag(tmp_path: Path) -> None:
    metrics = ("n", "Q", "V", "V_W", "V_on_M_r2", "norm_Q_expected", "cka_to_previous", "my_metric")
    steps = (0, 8, 64)
    changes = {(step, "embed", "V_W"): 0.0 for step in steps}
    changes |= {(step, "embed", "V_on_M_r2"): np.nan for step in steps}
    sweep = SweepFolder(make_sweep(tmp_path, steps, 2, metrics=metrics, changes=changes))
    for step in steps:
        records = sweep.read(f"step{step}")
        is_kept = (records["metric"] != "norm_Q_expected") | (records["layer"] == "final_norm")
        is_kept &= (records["metric"] != "cka_to_previous") | (step > 0)
        sweep.write(f"step{step}", records[is_kept])
    assert "Missing numbers" not in raised(tmp_path)
    for layer, metric in (("block.00", "V_on_M_r2"), ("embed", "my_metric")):
        records = sweep.read("step64")
        is_gap = (records["layer"] == layer) & (records["metric"] == metric)
        sweep.write("step64", records.assign(value=records["value"].where(~is_gap)))
    missing = ["R² of V on M: block.00, step 64", "my_metric: embed, step 64"]
    assert raised(tmp_path)["Missing numbers"] == missing


def test_few_token_types_in_the_regressions_are_flagged_once(tmp_path: Path) -> None:
    metrics = ("n", "token_types_regressed", "V_freq_r2")
    changes = {
        (step, layer, key): value
        for step in (0, 8)
        for layer in layer_names(2)
        for key, value in (("token_types_regressed", 1.0), ("V_freq_r2", np.nan))
    }
    found = raised(make_sweep(tmp_path, (0, 8), 2, metrics=metrics, changes=changes))
    assert list(found) == ["Few token types in the regressions"]
    assert len(found["Few token types in the regressions"]) == len(layer_names(2))


def run_of(tables: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> Run:
    """The run of one measurement of rows with token ids at some layers."""
    records = []
    for layer, (rows, ids) in tables.items():
        metric = TokenMoments(rows.shape[1])
        metric.update(rows, token_ids=ids)
        found = metric.compute().items()
        records += [{"layer": layer, "metric": key, "value": float(value)} for key, value in found]
    (run,) = runs_of_records(pd.DataFrame(records))
    return run


def rows_of_types(
    num_types: int, seed: int, *, num_special: int = 0
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Rows of token types that trade M for V, where that is only noise, and where it is not; the
    first types are far from the trade-off.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = 1 / torch.arange(1.0, num_types + 1)
    ids = torch.multinomial(weights, 40 * num_types, replacement=True, generator=generator)
    ids = torch.cat((ids, torch.arange(num_types).repeat(10)))
    noise = torch.randn(len(ids), 32, generator=generator, dtype=torch.float64)
    means = torch.randn(num_types, 32, generator=generator, dtype=torch.float64)
    size = torch.rand(num_types, 1, generator=generator, dtype=torch.float64)
    traded = means[ids] * size[ids] + noise * (1 - size[ids]).sqrt()
    is_special = ids < num_special
    traded[is_special] = 10 + 0.1 * noise[is_special]
    return {
        "block.00": (noise, ids),
        "block.01": (noise + means[ids], ids),
        "block.02": (traded, ids),
    }


@pytest.mark.parametrize("num_special", [0, 2])
def test_two_types_that_a_regression_rests_on_are_flagged(num_special: int) -> None:
    kept = rows_of_types(320, 0)["block.02"]
    run = run_of(rows_of_types(320, 0, num_special=num_special))
    found = {flag.title: flag.details for flag in flags(run)}
    details = found.get("Regressions on two token types", [])
    assert len(details) == (num_special > 0)
    for line in details:
        values = run.table("V_on_M_slope")["block.02"], run.table("V_on_M_r2")["block.02"]
        rows, ids = kept[0][kept[1] > 1], kept[1][kept[1] > 1]
        without = run_of({"block.02": (rows, ids)})
        slope, r2 = (without.values[key].iloc[0] for key in ("V_on_M_slope", "V_on_M_r2"))
        assert line == (
            f"block.02: slope {values[0].iloc[0]:.4g}, without them {slope:.4g}; "
            f"R² {values[1].iloc[0]:.4g}, without them {r2:.4g}; 320 types"
        )


@pytest.mark.parametrize("num_types", [149, 150])
def test_regressions_on_few_types_are_not_in_the_overview(num_types: int) -> None:
    run = run_of(rows_of_types(num_types, 0))
    table = overview([run], has_errors=False)
    over_types = [key for key in run.metrics if term(key).group == "token types"]
    assert len(over_types) == 11
    assert not {*over_types} & {*table.metrics}
    assert ({*over_types} <= {*table.more}) == (num_types == 150)
    assert (not {*over_types} & {*table.more}) == (num_types == 149)
    assert num_regressed("V_on_M_slope", [run]) == f"Of {num_types} token types."
    assert num_regressed("V", [run]) == ""


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1])
def test_near_copies_are_flagged_where_they_move_the_intrinsic_dimension(
    tmp_path: Path, share: float
) -> None:
    rows, copies = torch.randn(2, 4000, 10, generator=torch.Generator().manual_seed(0))
    num_copies = int(4000 * share)
    rows[4000 - num_copies :] = rows[:num_copies] + 1e-3 * copies[:num_copies]
    metric = IntrinsicDimension(10)
    metric.update(rows)
    # elsewhere TwoNN's is the larger, which is no sign of copies
    usual = {"intrinsic_dimension": 9.0, "intrinsic_dimension_next_scale": 3.0, "n_points": 4000.0}
    places = [(step, layer) for step in (0, 8) for layer in layer_names(2)]
    changes = {(*place, key): value for place in places for key, value in usual.items()}
    changes |= {(0, "block.01", key): float(value) for key, value in metric.compute().items()}
    folder = make_sweep(tmp_path, (0, 8), 2, metrics=("n", *usual), changes=changes)
    found = raised(folder).get("Near copies in the intrinsic dimension", [])
    assert len(found) == (share == 0.1)
    said = r"block.01: 0\.3\d*, and \d\.\d+ at the next scale at step 0"
    assert all(re.fullmatch(said, line) for line in found)


def test_whatever_ends_it_the_earlier_report_stays(plain: Path, tmp_path: Path) -> None:
    def fails(fault: BaseException, words: str) -> None:
        broken = mock.patch("pyarrow.csv.write_csv", side_effect=fault)
        with broken, pytest.raises(type(fault), match=words):
            report(plain, out=tmp_path / "out", metrics=["M"])

    fails(KeyboardInterrupt(), "^$")
    assert contents(tmp_path) == {}
    report(plain, out=tmp_path / "out", metrics=["M"])
    (tmp_path / "out" / "mine.txt").write_text("kept")
    before = contents(tmp_path)
    fails(ZeroDivisionError("x"), "x")
    fails(OSError(ENOSPC, "No space left on device"), r"is not \(No space left on device\)")
    assert contents(tmp_path) == before
    (tmp_path / "out" / "figures" / "old.png").touch()
    report(plain, out=tmp_path / "out", metrics=["M"])
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_a_report_that_is_killed_leaves_the_earlier_one_and_the_next_one_cleans_up(
    tmp_path: Path,
) -> None:
    folder = make_sweep(tmp_path / "a", (0, 1), 1, metrics=("n", "M"))
    report(folder)
    before = contents(folder / "report")
    script = (
        "import os, sys, pathlib, embedgeo.report as r; r.write_page = lambda *_: "
        "os.kill(os.getpid(), 9); r.write_report([pathlib.Path(sys.argv[1])])"
    )
    done = subprocess.run([sys.executable, "-c", script, folder], timeout=200, check=False)
    assert done.returncode == -9
    assert contents(folder / "report").items() > before.items()
    report(folder)
    assert contents(folder / "report") == before


def bad_input(tmp_path: Path, plain: Path) -> dict[str, list[Path]]:
    """Arguments of the command by what it says of them."""
    for name in ("columns", "empty", "other", "full", "corrupt/checkpoints", "older/checkpoints"):
        (tmp_path / name).mkdir(parents=True)
    corrupt, older = (tmp_path / name for name in ("corrupt", "older"))
    (corrupt / "checkpoints" / "step1.parquet").write_bytes(b"PAR1 not really")
    for path in (plain / "checkpoints").iterdir():
        table = pd.read_parquet(path).drop(columns=["width", "series", "stderr"])
        table.to_parquet(older / "checkpoints" / path.name)
    pd.DataFrame({"step": [1]}).to_parquet(tmp_path / "columns" / "history.parquet")
    (tmp_path / "other" / "mine.txt").touch()
    (tmp_path / "file").touch()
    return {
        "folders of runs": [tmp_path / "nosuch"],
        "none": [tmp_path / "file"],
        "no measurements": [tmp_path / "empty"],
        "step1.parquet must be a Parquet file": [corrupt],
        "layer_index, width, metric, value, stderr missing": [tmp_path / "columns"],
        "series, width, stderr missing. Was it written by another version of embedgeo?": [older],
        "holds something else": [plain, Path("--out"), tmp_path / "other"],
        "can be written": [plain, Path("--out"), tmp_path / "file" / "out"],
        "required": [],
        f"a report of several folders needs a folder of its own; got {plain}, {plain} without "
        "one. Give --out FOLDER.": [plain, plain],
    }


def test_bad_input_gives_one_line_and_status_2(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, arguments in bad_input(tmp_path, plain).items():
        before = sorted(tmp_path.rglob("*"))
        try:
            status = main(["report", *map(str, arguments)])
        except SystemExit as stopped:
            status = stopped.code
        captured = capsys.readouterr()
        assert (status, captured.out) == (2, "")
        (line,) = captured.err.splitlines()
        assert line.startswith("embedgeo: error: ")
        assert words in line
        assert sorted(tmp_path.rglob("*")) == before


def test_a_report_of_an_earlier_history_leaves_that_of_the_folder_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unpainted: None
) -> None:
    for value in (1.0, 2.0):
        write_history(tmp_path / "a", value)
    earlier = str(tmp_path / "a" / "history.1.parquet")
    before = contents(tmp_path)
    assert main(["report", earlier]) == 2
    assert "a report of a history itself needs a folder of its own" in capsys.readouterr().err
    assert contents(tmp_path) == before
    assert main(["report", "--out", str(tmp_path / "earlier"), earlier]) == 0
    table = pd.read_csv(tmp_path / "earlier" / "metrics.csv").query("metric == 'my_metric'")
    assert table["value"].max() == 1 + 8


def test_a_terminal_has_a_bar_and_a_file_has_not(
    plain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for on_terminal in (False, True):
        if on_terminal:
            monkeypatch.setenv("TTY_COMPATIBLE", "1")
        report(plain, out=tmp_path / "out", metrics=["M"])
        assert ("Drawing figures" in capsys.readouterr().err) == on_terminal
