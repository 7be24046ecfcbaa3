"""Two runs compared: which numbers differ, how surely, and from which step on."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from embedgeo import EmbeddingMoments, StepMonitor, compare, observe
from embedgeo.report.runs import read_runs
from embedgeo.report.verdicts import verdicts
from embedgeo.results.folder import SweepFolder
from tests.models import gpt_neox, token_batch
from tests.report.page import report
from tests.report.synthetic import make_sweep

STEPS = (0, 8, 64, 512)
METRICS = ("n", "M_over_Q", "anisotropy")
BLOCKS = ["block.00", "block.01"]


def run_in(folder, shifts=(), stderr=0.01, **options):
    """A sweep whose M / Q is 0.5, and so much more at steps."""
    changes = {(step, layer, "M_over_Q"): 0.5 for step in STEPS for layer in BLOCKS}
    changes |= {(step, layer, "M_over_Q"): 0.5 + x for step, x in shifts for layer in BLOCKS}
    return make_sweep(folder, STEPS, 2, metrics=METRICS, changes=changes, stderr=stderr, **options)


def row(*folders, **options):
    return compare(*folders, **options).set_index("metric").loc["M_over_Q"]


def test_two_runs_differ_beyond_two_errors_from_the_step_on_that_it_lasts(tmp_path):
    plain = run_in(tmp_path / "plain")
    # errors of 0.005 in both: 0.00707 of a difference
    other = run_in(tmp_path / "other", [(8, 0.1), (64, 0.012), (512, 0.03)])
    found = row(plain, other)
    assert found[["a", "b", "difference"]].tolist() == pytest.approx([0.5, 0.53, 0.03])
    assert found["stderr"] == pytest.approx(0.01 * np.hypot(0.5, 0.53), rel=1e-6)
    assert found["errors"] == pytest.approx(0.03 / found["stderr"])
    assert (found["step"], found["verdict"], found["from_step"]) == (512, "differs", 512)
    lasting = run_in(tmp_path / "lasting", [(64, 0.1), (512, 0.03)])
    assert row(plain, lasting)["from_step"] == 64
    near = row(plain, run_in(tmp_path / "near", [(512, 0.012)]))
    assert (near["verdict"], np.isnan(near["from_step"])) == ("does not differ", True)
    same = compare(plain, other).set_index("metric")["verdict"]
    assert same["anisotropy"] == "does not differ"


def test_without_errors_nothing_is_said_to_be_alike(tmp_path):
    plain, other = (run_in(tmp_path / name, stderr=np.nan) for name in ("plain", "other"))
    assert set(compare(plain, other)["verdict"]) == {"no error known"}
    sentences, _ = verdicts(*read_runs([plain, other]), [])
    assert sentences[-2:] == [
        "Whether both were measured on the same text is not recorded.",
        "Measure both with jackknife= for standard errors.",
    ]


def test_what_another_seed_changes_as_much_does_not_differ(tmp_path):
    plain = run_in(tmp_path / "plain")
    other = run_in(tmp_path / "other", [(512, 0.03)])
    seeds = [run_in(tmp_path / f"seed{i}", [(512, shift)]) for i, shift in enumerate((-0.02, 0.02))]
    found = row(plain, other, seeds=seeds)
    assert (found["verdict"], found["seeds"]) == ("does not differ", pytest.approx(0.04))
    assert row(plain, other, seeds=seeds[:1])["verdict"] == "differs"  # one has no range
    found = row(plain, run_in(tmp_path / "far", [(512, 0.05)]), seeds=seeds)
    assert found["verdict"] == "differs"


def test_where_seeds_were_not_measured_their_range_is_that_of_the_last_step_at_which_they_were(
    tmp_path,
):
    plain = run_in(tmp_path / "plain")
    other = run_in(tmp_path / "other", [(step, 0.03) for step in STEPS])
    changes = [{(100, layer, "M_over_Q"): x for layer in BLOCKS} for x in (0.45, 0.55)]
    seeds = [
        make_sweep(tmp_path / f"seed{i}", (0, 64, 100), 2, metrics=METRICS, changes=each)
        for i, each in enumerate(changes)
    ]
    found = row(plain, other, seeds=seeds)
    assert (found["verdict"], found["seeds"]) == ("does not differ", pytest.approx(0.1))
    for references in ([], read_runs(seeds[:1])):
        sentences, _ = verdicts(*read_runs([plain, other]), references)
        assert "What another seed does is not known: give two runs of other seeds" in sentences[-1]


def read_with(folder, length, token):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["asked"]["seq_len"] = length
    manifest["text"] = {"sha256": "", "tokens_sha256": token}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_runs_that_are_measured_otherwise_are_not_compared(tmp_path):
    plain, other = (run_in(tmp_path / name) for name in ("plain", "other"))
    read_with(plain, 64, "a")
    read_with(other, 32, "b")
    assert set(compare(plain, other)["verdict"]) == {"cannot be compared"}
    sentences, _ = verdicts(*read_runs([plain, other]), [])
    assert sentences == [
        "These runs cannot be compared: they differ in sequence length, token ids."
    ]
    with pytest.raises(ValueError, match="a reference must be measured like the runs"):
        compare(plain, plain, seeds=[other])


def deviations(random, shared):
    """A table of the jackknife, of deviations that are the same in both runs but for noise."""
    parts = [
        pd.DataFrame(
            {
                "layer": layer,
                "layer_index": i,
                "group": range(8),
                "deviation": shared + 1e-4 * random.standard_normal(8),
                "metric": "M_over_Q",
            }
        )
        for i, layer in enumerate(BLOCKS)
    ]
    return pd.concat(parts, ignore_index=True)


def test_of_the_same_text_the_error_of_a_difference_is_paired(tmp_path):
    random = np.random.default_rng(0)
    shared = 0.01 * random.standard_normal(8)
    tables = {name: deviations(random, shared) for name in ("plain", "other")}
    folders = []
    for (name, table), shift in zip(tables.items(), (0.0, 0.002), strict=True):
        records = SweepFolder(run_in(tmp_path / f"{name} alone", [(512, shift)])).read("step512")
        folder = SweepFolder(tmp_path / name)
        folder.open({"model": ["lab/tiny"], "text_sha256": "a" * 64}, {})
        folder.write("step512", records, {"jackknife": table})
        folders.append(folder.path)
    found = row(*folders)
    of_means = [table.groupby("group")["deviation"].mean() for table in tables.values()]
    expected = np.sqrt(((of_means[1] - of_means[0]) ** 2).sum())
    assert found["stderr"] == pytest.approx(expected, rel=1e-9)
    assert found["verdict"] == "differs"
    (first, second) = read_runs(folders)
    of_first = first.mean_errors("M_over_Q").iloc[-1, 0]
    assert of_first == pytest.approx(np.sqrt((of_means[0] ** 2).sum()), rel=1e-9)
    assert second.label == "other"
    final = SweepFolder(tmp_path / "final")
    final.open({"model": ["lab/tiny"], "text_sha256": "a" * 64}, {})
    last = SweepFolder(folders[1]).read("step512").assign(step=0, revision="main")
    final.write("main", last, {"jackknife": tables["other"]}, facts={"has_step": "false"})
    assert row(folders[0], final.path)["stderr"] == pytest.approx(expected, rel=1e-9)
    unknown = tables["plain"].assign(deviation=np.nan)
    folder = SweepFolder(tmp_path / "plain")
    folder.write("step512", folder.read("step512").assign(stderr=np.nan), {"jackknife": unknown})
    assert row(*folders)["verdict"] == "no error known"
    folder.write("step512", records, {"jackknife": tables["plain"]})
    for folder, token in zip(folders, "ab", strict=True):
        read_with(folder, 64, token)
    independent = [run.mean_errors("M_over_Q").iloc[-1, 0] for run in (first, second)]
    assert row(*folders)["stderr"] == pytest.approx(np.hypot(*independent))
    same = row(folders[0], folders[0])
    assert (same["errors"], same["verdict"]) == (0.0, "does not differ")
    assert "does not differ, by 0 (0.0 standard errors)" in verdicts(first, first, [])[0][0]


def test_of_monitors_with_the_same_probe_the_error_of_a_difference_is_paired(tmp_path):
    probe = [token_batch(8, seed=1), token_batch(8, seed=2)]
    means = []
    options = {"metrics": lambda dim: [EmbeddingMoments(dim)], "jackknife": 4}
    torch.manual_seed(0)
    model = gpt_neox().eval()
    for name in "ab":
        nn.init.normal_(model.get_input_embeddings().weight[5])
        folder = tmp_path / name
        monitor = StepMonitor(model, probe=probe, on_error="raise", folder=folder, **options)
        for step in range(3):
            with monitor.step(step):
                model(**token_batch())
        monitor.close()
        with torch.no_grad(), observe(model, **options) as geometry:
            for batch in probe:
                model(**batch)
        geometry.records()
        table = geometry.layer_tables()["jackknife"]
        own = table[table["layer"].str.startswith("block") & (table["metric"] == "M_over_Q")]
        means.append(own.groupby("group")["deviation"].mean())
    found = row(tmp_path / "a", tmp_path / "b")
    assert found["stderr"] == pytest.approx(np.linalg.norm(means[1] - means[0]), rel=1e-5)
    assert 0 < found["stderr"] < np.linalg.norm(means) / 2


def test_the_report_of_two_runs_begins_with_what_differs(tmp_path, capsys):
    plain = run_in(tmp_path / "plain")
    other = run_in(tmp_path / "other", [(64, 0.1), (512, 0.03)])
    report(plain, other, out=tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    said = (
        "M / Q: 0.5000 ± 0.0050 in plain, 0.5300 ± 0.0053 in other at step 512: differs, by "
        "0.0300 ± 0.0073 (4.1 standard errors); apart from step 64 on."
    )
    assert said in capsys.readouterr().err
    assert page.index('id="compared"') < page.index(said) < page.index('id="what-happened"')


def test_each_argument_has_one_run(tmp_path):
    plain = run_in(tmp_path / "plain")
    with pytest.raises(ValueError, match="takes two runs, one from each argument; got 1 and 0"):
        compare(plain, [])


def test_a_final_model_is_compared_with_the_last_step_of_a_run(tmp_path):
    run = run_in(tmp_path / "run", [(512, 0.3)])
    records = SweepFolder(run).read("step512").assign(step=0, revision="main")
    final = SweepFolder(tmp_path / "final")
    final.open({"model": ["lab/tiny"]}, {})
    final.write("main", records, facts={"has_step": "false"})
    found = row(final.path, run)
    assert found[["a", "b", "step", "verdict"]].tolist() == [0.8, 0.8, 512, "does not differ"]
    assert "at step 512: does not differ" in verdicts(*read_runs([final.path, run]), [])[0][0]


def test_runs_without_a_common_step_are_said(tmp_path):
    folders = [
        make_sweep(tmp_path / str(step), (step,), 2, metrics=METRICS, stderr=0.1)
        for step in (8, 64)
    ]
    sentences, _ = verdicts(*read_runs(folders), [])
    assert sentences == ["These runs cannot be compared: they have no headline at a common step."]
    assert [*compare(*folders)["verdict"]] == []


def test_monitors_and_geometries_are_compared_by_their_settings():
    model = gpt_neox()
    monitors = [StepMonitor(model, skip_first_positions=skip, on_error="raise") for skip in (0, 1)]
    for monitor in monitors:
        for step in range(2):
            with monitor.step(step):
                model(**token_batch())
        monitor.close()
    assert set(compare(*monitors)["verdict"]) == {"cannot be compared"}
    assert set(compare(monitors[0], monitors[0])["verdict"]) == {"no error known"}
    observed = [observe(model, skip_first_positions=skip) for skip in (0, 1)]
    for geometry in observed:
        with geometry:
            model(**token_batch())
    assert set(compare(*observed)["verdict"]) == {"cannot be compared"}
