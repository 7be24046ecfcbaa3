"""StepMonitor in loops written by hand."""

import copy
import gc
import pickle
from contextlib import ExitStack, suppress
from itertools import chain, islice, repeat
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.tensorboard import SummaryWriter

from embedgeo import StepMonitor, observe
from embedgeo.training.batches import LastBatches, digest
from tests.files import events_of
from tests.models import NanoGPT, gpt_neox, hooks, token_batch
from tests.training.loops import go_on, loop, run_whole
from tests.training.runs import (
    OPTIONS,
    UserError,
    all_warnings,
    assert_same_values,
    by_step,
    moments,
    n_at,
    of_monitors,
    steps,
    value,
)


def run_on(monitor, numbers, model):
    go_on(monitor, numbers, lambda: model(**token_batch()), token_batch())


@pytest.mark.parametrize("make", [gpt_neox, NanoGPT])
def test_a_model_that_fabric_has_set_up_is_measured_and_left_as_it_was(make):
    model = make()
    wrapped, before = Fabric(accelerator="cpu").setup(model), type(model)
    ids = token_batch()["input_ids"]
    values = []
    for called in (model, wrapped):
        with torch.no_grad(), observe(called) as geometry:
            called(ids)
        values.append(geometry.compute())
    for layer, expected in values[0].items():
        assert values[1][layer] == pytest.approx(expected, nan_ok=True)
    assert {type(each) for each in (model, wrapped)} == {before, type(wrapped)}


def test_the_batches_of_one_optimizer_step_are_one_measurement():
    options = {"num_steps": 7, "accumulate": 3, "every_n_steps": 4, "window": 2, **OPTIONS}
    _, inside = loop(optimizer_inside=True, **options)
    assert n_at(inside) == dict.fromkeys((0, 4, 7), 2 * 3 * 48)


def test_a_step_may_be_a_tensor_that_is_counted_on_in_place():
    model, step = gpt_neox(), torch.tensor(0)
    monitor = StepMonitor(model, 2, measure_last=False, **OPTIONS)
    for _ in range(4):
        with monitor.step(step):
            model(**token_batch())
        step += 1
    monitor.close()
    assert steps(monitor) == [0, 2]
    with pytest.raises(TypeError, match="float"):
        StepMonitor(gpt_neox()).step(1.0)


def test_there_is_no_mean_over_blocks_where_one_was_replaced():
    logged = {}
    model, batch = gpt_neox(), token_batch()
    monitor = StepMonitor(model, 1, log=logged.__setitem__, measure_last=False, **OPTIONS)
    with all_warnings() as caught:
        for step in range(4):
            with monitor.step(step):
                model(**batch)
            model.gpt_neox.layers[1] = copy.deepcopy(model.gpt_neox.layers[1])
    (told,) = of_monitors(caught)
    assert "reached block.01. At step 1 there is no mean over blocks" in told
    found = pd.DataFrame(monitor.history)
    for step in range(3):
        assert ("geometry.V/mean" in logged[step]) == (step == 0)
    assert {*found[found.layer == "mean"].step} == {0}


@pytest.mark.parametrize("first", [1, 0])
def test_what_is_missing_since_the_embedding_table_is_another_one_is_named_once(first):
    model, batch = gpt_neox(), token_batch()
    monitor = StepMonitor(model, 1, measure_last=False, on_error="raise")
    with all_warnings() as caught:
        for step in range(4):
            with monitor.step(step):
                if first:
                    model(**batch)
                else:
                    model(inputs_embeds=model.get_input_embeddings()(batch["input_ids"]) + 1)
            if first:
                model.set_input_embeddings(copy.deepcopy(model.get_input_embeddings()))
    (told,) = of_monitors(caught)
    assert f"at step {first} no token ids were found, so what needs them is missing" in told


def run_both(monitor, model, chosen, rejected):
    with monitor.step(0, chosen):
        model(inputs_embeds=rejected)
        model(inputs_embeds=rejected + 1)


def test_a_mask_for_the_batch_is_of_one_pass_alone():
    model, chosen, rejected = gpt_neox(), token_batch(seed=1), token_batch(seed=2)
    mask = {"mask": lambda batch: batch["input_ids"] % 3 > 0}
    monitor = StepMonitor(model, 1, measure_last=False, **mask, **OPTIONS)
    for batch in (chosen, rejected):
        with monitor.step(0, batch):
            model(**batch)
            model(**batch)
    monitor.close()
    expected = sum(2 * int(mask["mask"](batch).sum()) for batch in (chosen, rejected))
    assert n_at(monitor) == {0: expected}
    monitor = StepMonitor(model, 1, **mask, **OPTIONS)
    with pytest.raises(ValueError, match="another one had other token ids"):
        run_both(monitor, model, chosen, torch.ones(4, 12, 16))


def test_a_step_inside_another_one_is_refused():
    model = gpt_neox()
    monitor = StepMonitor(model, 1, **OPTIONS)
    with pytest.raises(ValueError, match="inside another one"), monitor.step(0), monitor.step(0):
        model(**token_batch())


def test_a_model_that_another_one_is_trained_for_is_named_once(caplog):
    model, batch = gpt_neox(), token_batch()
    monitor = StepMonitor(model, 1, measure_last=False, **OPTIONS)
    with all_warnings() as caught, caplog.at_level("INFO"):
        for step in range(4):
            with monitor.step(step):
                (model if step == 0 else copy.deepcopy(model))(**batch)
        monitor.close()
    (told,) = of_monitors(caught)
    assert "no forward pass reached embed, block.00" in told
    assert caplog.text.count("is not measured: no forward pass reached") == 1
    assert steps(monitor) == [0]


def test_batches_in_one_buffer_are_not_run_again():
    model, batch = gpt_neox().train(), token_batch()
    monitor = StepMonitor(model, 4, window=2, **OPTIONS)
    for step in range(7):
        batch["input_ids"].random_(9)
        with monitor.step(step, batch):
            model(**batch)
    with pytest.warns(UserWarning, match="the last training batches were written to since"):
        monitor.close(7)
    assert steps(monitor) == [0, 4]


def test_a_batch_that_a_step_takes_from_is_run_again_as_it_was():
    model = gpt_neox().train()
    with StepMonitor(model, 4, **OPTIONS) as monitor:
        for step in range(6):
            with monitor.step(step, batch := token_batch()):
                model(input_ids=batch.pop("input_ids"), **batch)
    assert steps(monitor) == [0, 4, 6]


def test_long_lists_of_numbers_in_a_batch_are_not_read():
    class Unread(list):
        __iter__ = None

    batches = LastBatches(1)
    rows = [torch.ones(2)] * 100
    batches.add(0, batch := {"offsets": Unread([(0, 3)] * 100), "rows": rows})
    assert batches.full() == [batch]
    assert digest(batch) == digest(rows)


@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
def test_a_batch_that_lacks_what_the_step_gives_is_not_run_again(name):
    model, ids = gpt_neox().train(), token_batch()["input_ids"]
    told = {"attention_mask": ids > 9, "position_ids": torch.arange(ids.shape[1]).expand_as(ids)}
    monitor = StepMonitor(model, 2, **OPTIONS)
    for step in range(3):
        with monitor.step(step, {"input_ids": ids}):
            model(input_ids=ids, **{name: told[name]})
    with pytest.raises(ValueError, match=r"the layers get no (mask|position ids)"):
        monitor.close(3)
    assert steps(monitor) == [0, 2]


def test_batches_of_a_step_that_was_taken_are_left_out_and_told_once(caplog):
    model, batch = gpt_neox().train(), token_batch()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with caplog.at_level("INFO"), StepMonitor(model, 1, measure_last=False, **OPTIONS) as monitor:
        for step in (0, 0, 0, 1, 1):
            with monitor.step(step):
                model(**batch, labels=batch["input_ids"]).loss.backward()
            optimizer.step()
    assert n_at(monitor) == {0: 48, 1: 48}
    assert caplog.text.count("batches that come for step 0 after an optimizer has taken it") == 1


@pytest.mark.parametrize("num_steps", [5, 6])
def test_the_last_step_is_known_where_other_parameters_are_trained_in_the_end(num_steps):
    model, batch = gpt_neox(), token_batch()
    model.requires_grad_(False).gpt_neox.layers[0].requires_grad_()
    monitor = StepMonitor(model.train(), 4, **OPTIONS)
    for step in range(num_steps):
        if step in (0, 3):
            model.requires_grad_(False)
            layer = model.gpt_neox.layers[step > 0].requires_grad_()
            optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        with monitor.step(step, batch):
            model(**batch).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    assert steps(monitor) == [0, 4, num_steps]


def test_without_an_optimizer_of_torchs_the_next_step_completes_a_measurement():
    monitor = StepMonitor(model := gpt_neox(), 2, **OPTIONS)
    for step, measured in enumerate(([], [0], [0], [0, 2])):
        run_on(monitor, [step], model)
        assert steps(monitor) == measured
    other = torch.nn.Linear(2, 2)
    run_on(monitor, [4], model)
    torch.optim.SGD(other.parameters()).step()
    assert steps(monitor) == [0, 2]
    monitor.close(step=4)
    assert steps(monitor) == [0, 2, 4]
    assert hooks(model) == 0
    with pytest.warns(UserWarning, match="step after close measures nothing"):
        run_on(monitor, [6], model)
    monitor.close()
    assert steps(monitor) == [0, 2, 4]


class Run:
    """As a run of Weights & Biases."""

    def __init__(self):
        self.rows = {}

    def log(self, data, step=None):
        self.rows[step] = data


@pytest.mark.slow
@pytest.mark.usefixtures("unpainted")
def test_the_scalars_reach_whatever_is_given_as_the_log(tmp_path):
    values, run = {}, Run()
    with SummaryWriter(tmp_path) as writer:
        for log in (values.__setitem__, run, writer):
            _, monitor = loop(3, every_n_steps=2, log=log, **OPTIONS)
    assert list(values) == [0, 2, 3]
    pd.testing.assert_frame_equal(pd.DataFrame(values), pd.DataFrame(run.rows))
    events = events_of(tmp_path)
    tags = events.Tags()
    assert set(values[0]) <= set(tags["scalars"])
    expected = [row["geometry.V/mean"] for row in values.values()]
    found = [event.value for event in events.Scalars("geometry.V/mean")]
    assert found == pytest.approx(expected)
    assert {"geometry.heatmap/M_over_Q", "geometry.shares/M, V_W, V_B"} <= set(tags["images"])
    assert "custom_scalars__config__" in tags["tensors"]
    history = pd.read_parquet(tmp_path / "history.parquet").drop(columns="deviations")
    pd.testing.assert_frame_equal(history, pd.DataFrame(monitor.history)[list(history)])


def test_what_is_no_log_is_refused_at_once():
    said = r"log must be a function \(step, {tag: value}\).*; got str"
    with pytest.raises(TypeError, match=said):
        StepMonitor(gpt_neox(), log="runs")


@pytest.mark.parametrize("ends", ["dropped", "closed by log"])
def test_the_end_of_a_monitor_while_torch_goes_through_its_hooks_leaves_the_step_as_it_is(ends):
    """A monitor that is garbage is collected at any moment, also between two hooks of an
    optimizer.
    """
    model = gpt_neox()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def log(step, values):
        monitor.close()

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_post_hook(lambda *call: gc.collect()).remove)
        monitor = StepMonitor(model, every_n_steps=1, window=1, log=log, **OPTIONS)
        with monitor.step(0):
            model(**token_batch(2), labels=token_batch(2)["input_ids"]).loss.backward()
        stack.callback(register_optimizer_step_post_hook(lambda *call: None).remove)
        if ends == "dropped":
            monitor.itself = monitor  # so that only the collector finds it
            monitor = None
        optimizer.step()
        assert ends == "dropped" or steps(monitor) == [0]


def test_a_batch_that_fails_is_not_measured_and_the_next_one_is():
    monitor = StepMonitor(model := gpt_neox(), **OPTIONS)

    def fails():
        with monitor.step(0):
            model(**token_batch(2))
            raise UserError

    with pytest.raises(UserError):
        fails()
    with monitor.step(0):
        model(**token_batch(3))
    monitor.close()
    assert value(monitor, 0, "block.02", "n") == 36


@pytest.mark.parametrize("fails_at", [2, 3])
def test_a_batch_that_fails_after_others_of_its_window_ends_that_measurement_with_a_word(fails_at):
    monitor = StepMonitor(model := gpt_neox(), 4, window=4, measure_last=False, **OPTIONS)
    with all_warnings() as caught:
        for step in range(8):
            with suppress(UserError), monitor.step(step):
                model(**token_batch(2))
                if step == fails_at:
                    raise UserError
        monitor.close()
    (said,) = of_monitors(caught)
    assert "step 0 is not measured, for an exception ended a batch of it" in said
    assert n_at(monitor) == {4: 4 * 24}


class Merging(nn.LayerNorm):
    """Has another weight in eval mode, as adapters that are merged."""

    def train(self, mode=True):
        if mode is not self.training:
            self.weight.data += 1 - 2 * mode
        return super().train(mode)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_what_a_mode_does_to_weights_is_not_done_for_a_probe():
    model = gpt_neox().train()
    model.gpt_neox.layers[1].input_layernorm = Merging(16)
    model.teacher = torch.jit.freeze(torch.jit.script(nn.Linear(2, 2).eval()))  # has no mode
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with StepMonitor(model, 1, probe=[token_batch()], **OPTIONS) as monitor:
        for step in range(2):
            with monitor.step(step):
                assert model.training
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())


def test_a_probe_that_draws_other_batches_is_told_once_and_one_without_end_is_refused():
    class Drawn:
        def __iter__(self):
            return chain([token_batch()], islice(batches, num_batches))

    batches, num_batches = (token_batch(seed=seed) for seed in range(5)), 1
    with all_warnings() as caught:
        run_whole(StepMonitor(gpt_neox(), 1, probe=Drawn(), **OPTIONS), 4)
    (said,) = of_monitors(caught)
    assert "the probe's batches are others than at the last measurement" in said
    unknown = [SimpleNamespace(**token_batch())]
    forward = {"probe_forward": lambda model, batch: model(**vars(batch))}
    run_whole(other := StepMonitor(gpt_neox(), 1, probe=unknown, **forward, **OPTIONS), 2)
    assert ("probe" in other.origin, n_at(other)[1]) == (False, 48)
    batches, num_batches = repeat({}), None
    options = {"probe": Drawn(), "probe_forward": lambda *call: None, **OPTIONS}
    monitor = StepMonitor(gpt_neox(), 1, **options)
    with pytest.raises(ValueError, match="probe must end; it gives more than 2,000"):
        monitor.step(0).__enter__()


def test_steps_that_go_back_turn_monitoring_off_and_what_was_being_measured_is_kept(tmp_path):
    monitor = StepMonitor(model := gpt_neox(), 2, window=2, folder=tmp_path, metrics=moments)
    run_on(monitor, range(5), model)
    with pytest.warns(
        UserWarning,
        match="optimizer steps taken in the whole run, over all epochs; got 0 after 4. Count on",
    ) as caught:
        run_on(monitor, range(5), model)
    monitor.close()
    (reason,) = [str(each.message) for each in caught]
    assert "\n" not in reason
    assert n_at(monitor) == {0: 96, 2: 96, 4: 48}
    assert sorted(pd.read_parquet(tmp_path / "history.parquet")["step"].unique()) == [0, 2, 4]
    monitor = StepMonitor(model, 2, **OPTIONS)
    run_on(monitor, [2], model)
    with pytest.raises(ValueError, match="got 1 after 2"):
        run_on(monitor, [1], model)
    assert steps(monitor) == [2]
    assert hooks(model) == 0


@pytest.mark.parametrize("fails_at", [5, 6])
@pytest.mark.parametrize("with_probe", [True, False])
def test_a_step_that_failed_is_not_counted_as_taken(fails_at, with_probe):
    """The weights after an exception are those before the step."""
    probe = [token_batch(2)["input_ids"]] if with_probe else None
    model = gpt_neox()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = StepMonitor(model, every_n_steps=3, probe=probe, **OPTIONS)

    def train():
        for step in range(8):
            with monitor.step(step, batch := token_batch(2)["input_ids"]):
                model(batch, labels=batch).loss.backward()
                if step == fails_at:
                    raise UserError
            optimizer.step()

    with pytest.raises(UserError):
        train()
    monitor.close()
    assert steps(monitor) == [0, 3, fails_at]
    with observe(model, metrics=moments) as geometry, torch.no_grad():
        model(token_batch(2)["input_ids"])
    assert_same_values(by_step(monitor.history)[fails_at], geometry.compute())


def copied_by_pickle(value):
    return pickle.loads(pickle.dumps(value))


def ignore(step, values):
    pass


@pytest.mark.parametrize("copied", [copy.deepcopy, copied_by_pickle])
def test_a_copy_that_is_made_inside_a_measured_step_begins_anew(copied):
    model, batch = gpt_neox(), token_batch()
    monitor = StepMonitor(model, every_n_steps=2, log=ignore, metrics=moments)
    with monitor.step(0, batch):
        model(**batch)
        made = copied((monitor, model))
    monitor.close()
    other, other_model = made
    assert steps(other) == []
    go_on(other, (1, 2), lambda: other_model(**batch), batch)
    other.close()
    assert steps(other) == [2, 3]
    assert value(other, 2, "embed", "V") == value(monitor, 0, "embed", "V")


def test_a_step_that_no_optimizer_took_is_not_that_of_the_last_weights():
    model = gpt_neox()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    monitor = StepMonitor(model, 4, **OPTIONS)
    for i in range(5):  # two batches a step, and one that is left over
        with monitor.step(i // 2, token_batch()):
            model(**token_batch()).logits.mean().backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    monitor.close()
    assert steps(monitor) == [0, 2]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_teacher_of_torchs_own_layers_gives_the_same_in_measured_steps():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    teacher = nn.TransformerEncoder(layer, 1).eval()
    model, batch = gpt_neox(num_hidden_layers=1), token_batch()
    x, padding = torch.randn(4, 12, 16), torch.arange(12).expand(4, -1) > 7
    outputs = []

    def taught():
        with torch.no_grad():
            outputs.append(teacher(x, src_key_padding_mask=padding))
        model(**batch).logits.mean().backward()

    run_whole(StepMonitor(model, every_n_steps=2, metrics=moments), 2, taught, batch)
    assert torch.equal(*outputs)


def test_a_pass_of_averaged_weights_before_the_one_that_is_trained_does_not_leave_it_out():
    model = gpt_neox(num_hidden_layers=1)
    weight = model.get_output_embeddings().weight

    def taught():
        with torch.no_grad():
            weight.mul_(2)
            model(**token_batch())
            weight.div_(2)
        model(**token_batch()).logits.mean().backward()

    monitor = StepMonitor(model, every_n_steps=1, **OPTIONS)
    go_on(monitor, range(2), taught, token_batch())
    assert value(monitor, 0, "block.00", "n") == 48


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_step_without_with_is_told_once(num_steps):
    monitor = StepMonitor(gpt_neox(), 1, **OPTIONS)
    with all_warnings() as caught:
        for step in range(num_steps):
            monitor.step(step)
        monitor.close()
    (told,) = of_monitors(caught)
    assert told.endswith("Write: with monitor.step(step, batch): …")
