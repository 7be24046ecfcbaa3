"""How far the same rows have moved: the formula, the listener, and `embedgeo drift`."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from embedgeo import Drift, GeometryMonitor, IntrinsicDimension, StepMonitor, load_results
from embedgeo.cli import main
from embedgeo.drift import debiased_cka
from embedgeo.results.folder import SweepFolder
from embedgeo.results.parquet import to_frame
from embedgeo.results.records import Record
from embedgeo.results.samples import LayerSample
from tests.data import gaussian, generator
from tests.files import events_of
from tests.models import gpt_neox, token_batch
from tests.training.runs import moments

BATCHES = [token_batch(3, seed=100 + i, padding="left" if i == 1 else None) for i in range(2)]
N, DIM = 60, 4
LAYERS = ("embed", "block.00")


def sampled(dim):
    return [*moments(dim), IntrinsicDimension(dim, 128)]


def naive_cka(x, y):
    """The published formula."""
    n = len(x)
    one = np.ones(n)

    def hsic(k, m):
        k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
        sums = one @ k @ one * (one @ m @ one) / ((n - 1) * (n - 2))
        return (np.trace(k @ m) + sums - 2 / (n - 2) * (one @ k @ m @ one)) / (n * (n - 3))

    k, m = (each.double().numpy() @ each.double().numpy().T for each in (x, y))
    return hsic(k, m) / math.sqrt(hsic(k, k) * hsic(m, m))


@pytest.mark.parametrize("widths", [(6, 8), (70, 90)])
def test_debiased_cka_is_the_published_formula(widths):
    x = gaussian(40, widths[0], seed=1)
    y = x @ gaussian(*widths, seed=3) + gaussian(40, widths[1], seed=2)
    assert float(debiased_cka(x, y)) == pytest.approx(naive_cka(x, y), rel=1e-9)
    turn = torch.linalg.qr(gaussian(widths[0], widths[0], seed=4)).Q
    assert float(debiased_cka(x, 9 * x @ turn + 3)) == pytest.approx(1, rel=1e-9)
    x[0] = torch.nan
    assert float(debiased_cka(x, y)) == pytest.approx(naive_cka(x[1:], y[1:]), rel=1e-9)
    assert math.isnan(debiased_cka(x[1:4], y[1:4]))
    assert math.isnan(debiased_cka(torch.full_like(x, 0.1), y))
    with pytest.raises(ValueError, match=r"must be the same rows.*\(40, .*\(39, "):
        debiased_cka(x, y[1:])


def hidden_rows(model):
    """The rows of the probe that count, at two layers."""
    with torch.no_grad():
        passes = [model(**each, output_hidden_states=True).hidden_states for each in BATCHES]
    marks = [each["attention_mask"].bool() for each in BATCHES]
    return {
        layer: torch.cat([states[i][mark] for states, mark in zip(passes, marks, strict=True)])
        for i, layer in enumerate(LAYERS)
    }


def test_a_monitor_compares_the_rows_of_its_probe():
    model, rows = gpt_neox(), {}
    monitor = StepMonitor(
        model, 2, metrics=sampled, probe=BATCHES, listeners=[Drift()], on_error="raise"
    )
    for step in range(3):
        rows[step] = hidden_rows(model.eval())
        with monitor.step(step, BATCHES[0]):
            model(**BATCHES[0])
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator(step)))
    monitor.close()
    rows[3] = hidden_rows(model.eval())
    found = {
        (record["step"], record["layer"], record["metric"]): record["value"]
        for record in monitor.history
        if record["metric"].startswith("cka_to_")
    }
    assert {step for step, *_ in found} == {2, 3}
    for step, previous in ((2, 0), (3, 2)):
        for layer, now in rows[step].items():
            for key, other in (("previous", previous), ("first", 0)):
                expected = naive_cka(now, rows[other][layer])
                assert found[step, layer, f"cka_to_{key}"] == pytest.approx(expected, rel=1e-5)
        blocks = [found[step, f"block.0{i}", "cka_to_first"] for i in range(3)]
        assert found[step, "mean", "cka_to_first"] == pytest.approx(sum(blocks) / 3)


def drift(listener, step, token_ids=None):
    """What a listener returns of a measurement by hand, by layer and metric."""
    samples = {
        layer: LayerSample(
            N, rows=rows_at(step, i), row_numbers=torch.arange(N), token_ids=token_ids
        )
        for i, layer in enumerate(LAYERS)
    }
    geometry = SimpleNamespace(samples=lambda: samples, device=None)
    records = [{"layer": layer, "layer_index": i} for i, layer in enumerate(LAYERS)]
    added = listener(step, records, geometry)
    return {(each["layer"], each["metric"]): each["value"] for each in added}


def test_a_checkpoint_holds_the_rows_of_the_first_and_the_last_measurement(tmp_path):
    whole, resumed = Drift(), Drift()
    for step in (0, 2):
        drift(whole, step)
    torch.save(whole.state_dict(), tmp_path / "drift.pt")
    resumed.load_state_dict(torch.load(tmp_path / "drift.pt", weights_only=True))
    assert drift(resumed, 4) == (expected := drift(whole, 4))
    assert len(expected) == 6  # of two layers and the mean


def test_a_probe_that_changes_is_said_once_and_comparing_begins_again():
    listener, ids = Drift(), torch.arange(N)
    drift(listener, 0, ids)
    with pytest.warns(UserWarning, match=r"at step 4 layer 'embed' has rows of other tokens"):
        assert drift(listener, 4, ids + 1) == {}
    found = drift(listener, 6, ids + 1)
    assert found["embed", "cka_to_first"] == found["embed", "cka_to_previous"]
    assert drift(listener, 8, ids) == {}  # and nothing is said


def test_it_needs_a_probe_and_says_once_that_no_metric_samples_rows():
    with pytest.raises(ValueError, match=r"a Drift needs the same rows .* Give probe="):
        GeometryMonitor(listeners=[Drift()])
    listener, geometry = Drift(), SimpleNamespace(samples=dict, device=None)
    with pytest.warns(UserWarning, match="no metric does") as caught:
        assert [*listener(0, [], geometry), *listener(2, [], geometry)] == []
    assert len(caught) == 1


def rows_at(step, layer):
    moved = 0.1 * step * gaussian(N, DIM, seed=2 + layer)
    return (gaussian(N, DIM, seed=1) + moved + layer * gaussian(N, DIM, seed=9)).float()


def write(folder, step, numbers, name=None):
    """A checkpoint whose samples are of these row numbers."""
    value = {"width": DIM, "metric": "Q", "value": 1.0 + step, "stderr": math.nan}
    records = [Record(layer=layer, layer_index=i, **value) for i, layer in enumerate(LAYERS)]
    sample = {
        layer: LayerSample(N, rows=rows_at(step, i)[numbers], row_numbers=numbers.clone())
        for i, layer in enumerate(LAYERS)
    }
    about = {"model": "lab/tiny", "revision": f"step{step}", "step": step, "series": "step"}
    about |= {"commit": "", "weights_sha256": str(step), "duplicate_of": None}
    name = name or f"step{step}"
    SweepFolder(folder).write(name, to_frame(records, **about), sample=sample)


def test_the_command_compares_saved_rows_and_goes_on_where_it_was(tmp_path, capsys):
    SweepFolder(tmp_path).open({"model": ["lab/tiny"]}, {})
    orders = {step: torch.randperm(N, generator=generator(step)) for step in (0, 1, 4)}
    orders[1] = orders[1][:40]
    for step, numbers in orders.items():
        write(tmp_path, step, numbers)
    for num_new in (2, 0):
        assert main(["drift", str(tmp_path)]) == 0
        said = capsys.readouterr().out
        assert f"{num_new} of 2 checkpoints compared now: {tmp_path / 'drift'}" in said
        assert said.count("cka_to_previous") == num_new
    write(tmp_path, 4, orders[4])
    assert main(["drift", str(tmp_path)]) == 0
    assert "1 of 2 checkpoints" in capsys.readouterr().out
    found = load_results(tmp_path).set_index(["step", "layer", "metric"])["value"]
    shared = orders[1].sort().values
    for i, layer in enumerate(LAYERS):
        to_previous = naive_cka(rows_at(4, i)[shared], rows_at(1, i)[shared])
        assert found[4, layer, "cka_to_previous"] == pytest.approx(to_previous, rel=1e-9)
        to_first = naive_cka(rows_at(4, i), rows_at(0, i))
        assert found[4, layer, "cka_to_first"] == pytest.approx(to_first, rel=1e-9)
    (tmp_path / "drift" / "step4.parquet").unlink()
    (tmp_path / "samples" / "step1.safetensors").write_bytes(b"nothing")
    assert main(["drift", str(tmp_path)]) == 2
    assert "step1.safetensors" in capsys.readouterr().err


def test_a_checkpoint_that_comes_between_or_before_two_takes_the_drift_of_the_later_ones(tmp_path):
    SweepFolder(tmp_path).open({"model": ["lab/tiny"]}, {})
    for step in (1, 8):
        write(tmp_path, step, torch.arange(N))
    assert main(["drift", str(tmp_path)]) == 0
    assert "cka_to_previous" in {*load_results(tmp_path)["metric"]}
    SweepFolder(tmp_path).rebuild()
    write(tmp_path, 4, torch.arange(N))
    SweepFolder(tmp_path).rebuild()
    (run,) = (tmp_path / "tensorboard").iterdir()
    assert not [tag for tag in events_of(run).Tags()["scalars"] if "cka" in tag]
    assert {*load_results(tmp_path)["metric"]} == {"Q"}
    assert main(["drift", str(tmp_path)]) == 0
    found = load_results(tmp_path)
    assert {*found.loc[found["metric"] == "cka_to_previous", "step"]} == {4, 8}
    write(tmp_path, 0, torch.arange(N))  # another first one
    assert not [metric for metric in load_results(tmp_path)["metric"] if "cka" in metric]
    assert main(["drift", str(tmp_path)]) == 0
    write(tmp_path, 8, torch.arange(N), name="step8-kept")
    assert main(["drift", str(tmp_path)]) == 0
    found = load_results(tmp_path)
    assert found.loc[found["metric"] == "cka_to_previous", "value"].max() < 0.999


def test_what_cannot_be_compared_is_refused(tmp_path, capsys):
    assert main(["drift", str(tmp_path / "nowhere")]) == 2
    assert "drift takes the folder of a sweep" in capsys.readouterr().err
    assert main(["drift", str(tmp_path)]) == 2
    assert "saved rows of several steps" in capsys.readouterr().err
    SweepFolder(tmp_path).open({"model": ["lab/tiny"]}, {})
    for step, status in ((0, 2), (1, 2), (4, 0)):
        write(tmp_path, step, torch.arange(N)[min(step, 1) :: 2])
        assert main(["drift", str(tmp_path)]) == status
    said = capsys.readouterr()
    assert said.out.count("step1: not compared, no layer has rows of the tokens of step0") == 2
    assert "1 of 2 checkpoints compared now" in said.out
    assert "saved rows of several steps, of the same tokens" in said.err
