"""The same rows at every measurement: what monitors with a probe say of how far they have moved."""

import numpy as np
import pytest
import torch

from embedgeo import Drift, GeometryMonitor, StepMonitor
from embedgeo.studies.representations import drift_values, linearity_values
from tests.models import gpt_neox, t5, token_batch
from tests.training.loops import loop
from tests.training.runs import (
    RESUMED,
    interrupted,
    moments,
    steps,
)

OF_PAIRS = ("cka", "procrustes", "neighbor_overlap")
TO_BELOW = {*(f"{key}_to_below" for key in OF_PAIRS), "linearity", "linearity_without_residual"}
OVER_TIME = {f"{key}_to_{which}" for key in OF_PAIRS for which in ("previous", "first")}
BATCHES = [token_batch(3, seed=100 + i, padding="left" if i == 1 else None) for i in range(2)]
OPTIONS = {
    "every_n_steps": 2,
    "metrics": moments,
    "probe": BATCHES,
    "listeners": [Drift()],
    "on_error": "raise",
}

pytestmark = RESUMED


def rows_of(monitor):
    """The rows that a monitor's checkpoint holds."""
    return monitor.state_dict()["listeners"]["0 Drift"]


def of_drift(history):
    """{(step, layer): {key: value}}, the drift alone."""
    table = {}
    for record in history:
        of_layer = table.setdefault((record["step"], record["layer"]), {})
        if record["metric"] in TO_BELOW | OVER_TIME:
            of_layer[record["metric"]] = record["value"]
    return table


def assert_equal(found, expected):
    """Bit for bit, but for the fit of the linearity, whose last digit depends on where in memory
    LAPACK works.
    """
    assert found.keys() == expected.keys()
    for place, values in expected.items():
        assert found[place].keys() == values.keys()
        for key, value in values.items():
            assert found[place][key] == (
                pytest.approx(value, rel=1e-12) if "linearity" in key else value
            ), (place, key)


def hidden_rows(model):
    """The rows of the probe that count, at the layers that the model itself returns."""
    model.eval()
    with torch.no_grad():
        passes = [
            (model(**batch, output_hidden_states=True).hidden_states, batch) for batch in BATCHES
        ]
    model.train()
    # the last block's output is not among them
    names = ["embed", *(f"block.0{i}" for i in range(2)), "final_norm"]
    each = [
        torch.cat([hidden[i][batch["attention_mask"].bool()] for hidden, batch in passes])
        for i in range(4)
    ]
    return dict(zip(names, each, strict=True))


def trained(num_steps=5, state=None, start=0, model=None, **options):
    """The rows at each step of a run, and its monitor; a run may go on from a state."""
    torch.manual_seed(0)
    model = model or gpt_neox()
    monitor, rows = StepMonitor(model, **{**OPTIONS, **options}), {}
    if state is not None:
        monitor.load_state_dict(state)
    for step in range(start, num_steps):
        batch = token_batch(seed=step)
        rows[step] = hidden_rows(model)
        with monitor.step(step, batch):
            model(**batch, labels=batch["input_ids"]).loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight.sub_(weight.grad, alpha=0.5)
        model.zero_grad()
    rows[num_steps] = hidden_rows(model)
    return rows, monitor, model


def naive_procrustes(x, y):
    x, y = (each.double().numpy() - each.double().numpy().mean(0) for each in (x, y))
    return (
        2
        - 2
        * np.linalg.svd((x / np.linalg.norm(x)).T @ (y / np.linalg.norm(y)), compute_uv=False).sum()
    )


def test_values_are_those_of_the_rows_of_the_probe():
    rows, monitor, _ = trained()
    monitor.close()
    assert steps(monitor) == [0, 2, 4, 5]
    found = of_drift(monitor.history)
    assert found[0, "embed"] == {}
    assert found[0, "block.00"].keys() == TO_BELOW
    assert found[2, "embed"].keys() == OVER_TIME
    for step, before in ((2, 0), (4, 2), (5, 4)):
        for layer, now in rows[step].items():
            got = found[step, layer]
            for which, other in (("previous", before), ("first", 0)):
                then = rows[other][layer]
                expected = {f"{k}_to_{which}": float(v) for k, v in drift_values(then, now).items()}
                expected[f"procrustes_to_{which}"] = naive_procrustes(then, now)
                shown = {key: got[key] for key in expected}
                assert shown == pytest.approx(expected, rel=1e-9, abs=1e-9)
    for step in steps(monitor):
        for lower, upper in (("embed", "block.00"), ("block.00", "block.01")):
            pair = rows[step][lower], rows[step][upper]
            expected = {f"{k}_to_below": float(v) for k, v in drift_values(*pair).items()}
            expected |= {k: float(v) for k, v in linearity_values(*pair).items()}
            shown = {key: found[step, upper][key] for key in TO_BELOW}
            assert shown == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_decoder_has_no_layer_below_its_first_one():
    model, batch = (
        t5(),
        {**token_batch(3, seed=1), "decoder_input_ids": token_batch(3, seed=1)["input_ids"]},
    )
    monitor = StepMonitor(model, **{**OPTIONS, "probe": [batch]})
    with monitor.step(0):
        pass
    found = of_drift(monitor.history)
    assert found[0, "encoder.block.00"].keys() == found[0, "decoder.block.00"].keys() == TO_BELOW
    assert found[0, "decoder.embed"] == {}


def test_a_checkpoint_of_a_loop_holds_the_rows_of_the_first_and_the_last_measurement(tmp_path):
    _, whole, _ = trained(num_steps=7)
    _, first, model = trained(num_steps=4)
    torch.save(first.state_dict(), tmp_path / "monitor.pt")
    state = torch.load(tmp_path / "monitor.pt", weights_only=True)
    _, second, _ = trained(num_steps=7, start=4, state=state, model=model)
    assert steps(second) == [4, 6]
    after = {key: values for key, values in of_drift(whole.history).items() if key[0] >= 4}
    assert_equal(of_drift(second.history), after)
    assert "listeners" not in loop(2, **{**OPTIONS, "listeners": ()}, close=False)[1].state_dict()


def test_a_resumed_lightning_run_goes_on_from_the_rows(tmp_path):
    first, second = (GeometryMonitor(**{**OPTIONS, "listeners": [Drift()]}) for _ in range(2))
    interrupted(tmp_path, [first], [second], at=4, end=6)
    assert steps(first) == [0, 2, 4]
    assert steps(second) == [6]
    found = of_drift(second.history)[6, "block.01"]
    assert found.keys() == OVER_TIME | TO_BELOW
    assert found["procrustes_to_first"] > found["procrustes_to_previous"] > 0


class Changes:
    """A probe that has other batches from its third round on."""

    rounds = 0

    def __iter__(self):
        self.rounds += 1
        return iter(BATCHES if self.rounds < 3 else [token_batch(5, seed=3)])


def test_a_probe_that_changes_is_said_once_and_comparing_starts_again():
    with pytest.warns(
        UserWarning, match=r"(?s)at layer 'embed' the probe has others than.*shuffle=False"
    ) as caught:
        monitor = loop(8, **{**OPTIONS, "probe": Changes()})[1]
    assert len([each for each in caught if "drift" in str(each.message)]) == 1
    found = of_drift(monitor.history)
    over_time = {step: found[step, "embed"].keys() for step in steps(monitor)}
    assert over_time == {0: set(), 2: OVER_TIME, 4: set(), 6: OVER_TIME, 8: OVER_TIME}
    assert found[6, "embed"]["cka_to_first"] == found[6, "embed"]["cka_to_previous"]
    assert found[8, "embed"]["cka_to_first"] != found[8, "embed"]["cka_to_previous"]


def test_rows_that_are_not_finite_once_are_left_out_then():
    model = gpt_neox()
    monitor = StepMonitor(model, **{**OPTIONS, "every_n_steps": 1})
    table = model.gpt_neox.embed_in.weight
    token, before = int(BATCHES[0]["input_ids"][0, 0]), table.detach().clone()
    for step in range(3):
        with torch.no_grad():
            torch.manual_seed(step)
            table.copy_(before * (1 + step * torch.rand(before.shape)))
            table[token] = torch.nan if step == 1 else before[token]
        with monitor.step(step):
            pass
    found = of_drift(monitor.history)
    for step in (1, 2):
        assert found[step, "embed"].keys() == OVER_TIME
        assert 0 < found[step, "embed"]["procrustes_to_first"] < 2
    assert len(rows_of(monitor)["first"]["embed"]["rows"]) == 2 * 36 - 6


def test_it_needs_a_probe_and_enough_rows():
    with pytest.raises(ValueError, match=r"a Drift compares the same rows .* Give probe="):
        GeometryMonitor(listeners=[Drift()])
    with pytest.raises(ValueError, match=r"num_rows must be 32 or more; got 5"):
        Drift(5)


def test_at_most_so_many_rows_are_kept_the_same_ones_and_in_their_order():
    many = token_batch(100, seed=7)
    options = {"probe": [many], "layers": "block.01", "num_steps": 3}
    kept = rows_of(trained(listeners=[Drift(40)], **options)[1])
    first, last = (kept[which]["block.01"] for which in ("first", "previous"))
    assert first["rows"].shape == (40, 16)
    assert torch.equal(first["row_numbers"], last["row_numbers"])
    assert (first["row_numbers"].diff() > 0).all()
    assert torch.equal(first["token_ids"], many["input_ids"].flatten()[first["row_numbers"]])
