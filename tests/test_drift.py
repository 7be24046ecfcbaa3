"""How far the same rows have moved: the formula, the listener, and `embedgeo drift`."""

import math

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
from tests.models import gpt_neox, token_batch
from tests.training.runs import moments

BATCHES = [token_batch(3, seed=100 + i, padding="left" if i == 1 else None) for i in range(2)]
N, DIM = 60, 4
LAYERS = ("embed", "block.00")


def sampled(dim):
    return [*moments(dim), IntrinsicDimension(dim, 128)]


def options(**more):
    given = {"metrics": sampled, "probe": BATCHES, "listeners": [Drift()], "on_error": "raise"}
    return {"every_n_steps": 2, **given, **more}


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


def trained(num_steps, *, state=None, start=0, model=None, **more):
    torch.manual_seed(0)
    model = model or gpt_neox()
    monitor, rows = StepMonitor(model, **options(**more)), {}
    if state is not None:
        monitor.load_state_dict(state)
    for step in range(start, num_steps):
        rows[step] = hidden_rows(model.eval())
        batch = token_batch(seed=step)
        with monitor.step(step, batch):
            model.train()(**batch, labels=batch["input_ids"]).loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight.sub_(weight.grad, alpha=0.5)
        model.zero_grad()
    rows[num_steps] = hidden_rows(model.eval())
    return rows, monitor, model


def of_drift(monitor):
    """{(step, layer): {key: value}}, the drift alone."""
    found = {}
    for record in monitor.history:
        if record["metric"].startswith("cka_to_"):
            values = found.setdefault((record["step"], record["layer"]), {})
            values[record["metric"]] = record["value"]
    return found


def test_a_listener_compares_the_rows_of_the_probe():
    rows, monitor, _ = trained(5)
    monitor.close()
    found = of_drift(monitor)
    assert {step for step, _ in found} == {2, 4, 5}
    for step, before in ((2, 0), (4, 2), (5, 4)):
        for layer, now in rows[step].items():
            expected = {
                "cka_to_previous": naive_cka(now, rows[before][layer]),
                "cka_to_first": naive_cka(now, rows[0][layer]),
            }
            assert found[step, layer] == pytest.approx(expected, rel=1e-5)
        blocks = [found[step, f"block.0{i}"]["cka_to_first"] for i in range(3)]
        assert found[step, "mean"]["cka_to_first"] == pytest.approx(sum(blocks) / 3)


def test_a_checkpoint_holds_the_rows_of_the_first_and_the_last_measurement(tmp_path):
    _, whole, _ = trained(7)
    _, first, model = trained(4)
    torch.save(first.state_dict(), tmp_path / "monitor.pt")
    state = torch.load(tmp_path / "monitor.pt", weights_only=True)
    _, second, _ = trained(7, start=4, state=state, model=model)
    after = {place: values for place, values in of_drift(whole).items() if place[0] >= 4}
    assert of_drift(second) == after


class Changes:
    """A probe that has other batches from its third round on."""

    rounds = 0

    def __iter__(self):
        self.rounds += 1
        return iter(BATCHES if self.rounds < 3 else [token_batch(3, seed=i) for i in (3, 4)])


def test_a_probe_that_changes_is_said_once_and_comparing_begins_again():
    with pytest.warns(UserWarning, match=r"at step 4 layer 'embed' has rows of other tokens"):
        _, monitor, _ = trained(8, probe=Changes())
    found = of_drift(monitor)
    assert {step for step, _ in found} == {2, 6}
    assert found[6, "embed"]["cka_to_first"] == found[6, "embed"]["cka_to_previous"]


def test_it_needs_a_probe_and_says_once_that_no_metric_samples_rows():
    with pytest.raises(ValueError, match=r"a Drift needs the same rows .* Give probe="):
        GeometryMonitor(listeners=[Drift()])
    with pytest.warns(UserWarning, match="no metric does") as caught:
        assert of_drift(trained(5, metrics=moments)[1]) == {}
    assert len(caught) == 1


def rows_at(step, layer):
    moved = 0.1 * step * gaussian(N, DIM, seed=2 + layer)
    return (gaussian(N, DIM, seed=1) + moved + layer * gaussian(N, DIM, seed=9)).float()


def write(folder, step, numbers):
    """A checkpoint whose samples are of these row numbers."""
    value = {"width": DIM, "metric": "Q", "value": 1.0 + step, "stderr": math.nan}
    records = [Record(layer=layer, layer_index=i, **value) for i, layer in enumerate(LAYERS)]
    sample = {
        layer: LayerSample(N, rows=rows_at(step, i)[numbers], row_numbers=numbers.clone())
        for i, layer in enumerate(LAYERS)
    }
    about = {"model": "lab/tiny", "revision": f"step{step}", "step": step, "series": "step"}
    about |= {"commit": "", "weights_sha256": str(step), "duplicate_of": None}
    SweepFolder(folder).write(f"step{step}", to_frame(records, **about), sample=sample)


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


def test_what_cannot_be_compared_is_refused(tmp_path, capsys):
    assert main(["drift", str(tmp_path / "nowhere")]) == 2
    assert "drift takes the folder of a sweep" in capsys.readouterr().err
    assert main(["drift", str(tmp_path)]) == 2
    assert "saved rows of several steps" in capsys.readouterr().err
