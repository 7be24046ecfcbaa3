"""Listeners of monitors: called in step, with the samples of all ranks, and taken out when they
fail.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from embedgeo import (
    Drift,
    GeometryMonitor,
    IntrinsicDimension,
    StepMonitor,
    load_results,
)
from tests.models import gpt_neox, token_batch
from tests.ranks import on_two_ranks
from tests.training.runs import all_warnings, moments


def sampled(dim):
    return [*moments(dim), IntrinsicDimension(dim, 64)]


class Heard:
    """A listener that keeps what it is called with, and fails at a step."""

    def __init__(self, fails_at=None):
        self.fails_at = fails_at
        self.steps = []

    def __call__(self, step, records, geometry):
        if step == self.fails_at:
            raise RuntimeError("not this one")
        self.steps.append(step)
        self.samples = geometry.samples()
        assert {record["step"] for record in records} == {step}
        assert {"mean", "block.00"} <= {record["layer"] for record in records}
        added = records[0] | {"metric": "heard", "value": 1.0}
        records.clear()
        return [added]

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = list(state["steps"])


def loop(last, *listeners, rank=0, num_ranks=1, **options):
    """A monitor after steps of a loop, on batches of this rank."""
    torch.manual_seed(0)
    model = gpt_neox(num_hidden_layers=2)
    monitor = StepMonitor(model, 1, listeners=listeners, **{"metrics": sampled} | options)
    with monitor:
        for step in range(last):
            with monitor.step(step):
                model(**token_batch(4, seed=step * num_ranks + rank))
    return monitor


class Breaks(Heard):
    """One of whose methods raises."""

    def __init__(self, method):
        super().__init__()
        setattr(self, method, self.stop)

    def __eq__(self, other):
        return True

    __hash__ = Heard.__hash__

    def stop(self, *_):
        raise RuntimeError("not this one")


@pytest.mark.parametrize("method", ["reset", "state_dict", "load_state_dict"])
def test_one_whose_state_fails_is_taken_out_and_training_goes_on(method):
    model = gpt_neox()
    saved = loop(1, Heard(), Breaks("other"), measure_last=False).state_dict()
    heard, broken = Heard(), Breaks(method)
    with all_warnings() as caught:
        monitor = StepMonitor(model, 1, metrics=sampled, listeners=[broken, heard])
        monitor.load_state_dict(saved)
        with monitor.step(1):
            model(**token_batch(4))
        monitor.state_dict()
        with monitor.step(2):
            model(**token_batch(4))
        monitor.close()
    (warning,) = (str(each.message) for each in caught)
    assert f"Breaks failed in {method} " in warning
    assert heard.steps == [0, 1, 2]
    assert [*map(id, monitor.listeners)] == [id(heard)]


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")  # a line of torch's
def test_torch_distributed_checkpoint_fills_the_state_of_a_monitor_that_has_not_begun(tmp_path):
    options = {"probe": [token_batch(4)], "measure_last": False, "metrics": None}
    saved = loop(2, Drift(), Heard(), **options).state_dict()
    filled = loop(0, Drift(), Heard(), **options).state_dict()
    dcp.save({"monitor": saved}, checkpoint_id=tmp_path)
    dcp.load({"monitor": filled}, checkpoint_id=tmp_path)
    assert repr(filled) == repr(saved)


def test_states_go_to_the_listeners_of_their_class_and_others_are_told():
    state = loop(2, Heard(), Heard(fails_at=9), measure_last=False).state_dict()
    monitor = StepMonitor(gpt_neox(), 1, listeners=[Breaks("other"), heard := Heard()])
    with pytest.warns(UserWarning, match="states of listeners that are not among .*Heard 1"):
        monitor.load_state_dict(state)
    assert heard.steps == [0, 1]


@pytest.mark.parametrize("added", [[{"a": 1}], [{"value": [1, 2]}], [{"layer": 3}], 5])
def test_what_is_no_record_is_a_failure_of_its_listener(tmp_path, added):
    def listener(step, records, geometry):
        if step == 1:
            return [records[0] | each if "a" not in each else each for each in added]

    with pytest.warns(UserWarning, match=r"the listener test_what_is\S+listener failed at step 1"):
        monitor = loop(3, listener, folder=tmp_path, measure_last=False)
    assert monitor.listeners == []
    assert sorted(load_results(tmp_path)["step"].unique()) == [0, 1, 2]


def test_an_added_record_has_all_keys_but_the_step():
    def lacks(step, records, geometry):
        return [{"metric": "mine", "value": 1.0}]

    keys = "layer, layer_index, width, metric, value, stderr"
    with pytest.raises(ValueError, match=f"must return records with the keys {keys}; got"):
        loop(1, lacks, on_error="raise")

    def adds(step, records, geometry):
        (first, *_) = records
        return [
            {key: value for key, value in (first | {"metric": "mine"}).items() if key != "step"}
        ]

    monitor = loop(2, adds, on_error="raise")
    assert {each["step"] for each in monitor.history if each["metric"] == "mine"} == {0, 1}


def test_listeners_are_a_list_of_functions_and_a_configuration_makes_them():
    for wrong in ([3], Heard()):
        with pytest.raises(TypeError, match="listeners must be a list of functions"):
            GeometryMonitor(listeners=wrong)
    made = {"class_path": "embedgeo.Drift", "init_args": {}}
    (drift,) = GeometryMonitor(listeners=[made], probe=[token_batch()]).listeners
    assert isinstance(drift, Drift)


def on_rank(rank):
    heard = Heard()
    with all_warnings() as caught:
        failing = Heard(fails_at=1 if rank else None)
        monitor = loop(2, failing, heard, rank=rank, num_ranks=2, measure_last=False)
    told = [str(each.message) for each in caught]
    samples = {layer: (each.rows, each.row_numbers) for layer, each in heard.samples.items()}
    return told, len(monitor.listeners), heard.steps, samples


@pytest.mark.slow
def test_on_ranks_they_fail_together_and_each_has_the_samples_of_all(tmp_path):
    (first, *left, samples), (second, *others, same) = on_two_ranks(on_rank, tmp_path)
    assert left == others == [1, [0, 1]]
    assert second == []
    assert len(first) == 1
    assert "not this one" in first[0]
    torch.manual_seed(0)
    model = gpt_neox(num_hidden_layers=2)
    heard = Heard()
    monitor = StepMonitor(model, 1, metrics=sampled, listeners=[heard], measure_last=False)
    with monitor, monitor.step(0):
        for rank in range(2):
            model(**token_batch(4, seed=2 + rank))
    for layer, expected in heard.samples.items():
        rows, numbers = samples[layer]
        assert torch.equal(rows, same[layer][0])
        assert len(rows) == 64
        assert torch.equal(numbers, expected.row_numbers)
        torch.testing.assert_close(rows, expected.rows)
