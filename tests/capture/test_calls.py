"""Calls of a model by its bare forward, of its copies and replicas, and those of its blocks
alone.
"""

import copy
import io
import threading
from contextlib import nullcontext
from functools import partial
from inspect import getfullargspec, signature

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from embedgeo import StepMonitor, default_metrics, observe
from embedgeo.capture.calls import kept_state, kept_weights
from tests.models import FAMILIES, gpt_neox, linear_block, token_batch
from tests.observed import kept_rows, observed, rows_seen
from tests.training.runs import row_counts


@pytest.mark.parametrize("family", ["gpt_neox", "bert", "t5"])
@pytest.mark.parametrize("whole", [True, False])
def test_padding_is_left_out_where_a_model_is_called_by_its_forward(family, whole):
    model, batch = FAMILIES[family].build().eval(), token_batch(padding="right")
    if family == "t5":
        batch["decoder_input_ids"] = batch["input_ids"]
    elif not whole:
        model = model.base_model
    expected = observed(model, batch, "*block.01")
    with observe(model, "*block.01", kept_rows) as geometry, torch.no_grad():
        model.forward(**batch)
    for layer in expected.compute():
        for seen, rows in zip(rows_seen(geometry, layer), rows_seen(expected, layer), strict=True):
            assert torch.equal(seen, rows), layer
    assert len(rows_seen(geometry, "encoder.block.01" if family == "t5" else "block.01")[0]) == 36


@pytest.mark.parametrize("as_function", [True, False])
def test_observe_takes_a_mask_and_token_ids_or_functions_of_the_batch(as_function):
    model, batch = gpt_neox().eval(), token_batch()
    keep, ids = batch["input_ids"] > 40, batch["input_ids"] + 7
    options = {"mask": keep, "token_ids": ids}
    if as_function:
        options = {"mask": lambda b: b["input_ids"] > 40, "token_ids": lambda b: b["input_ids"] + 7}
    geometry = observed(model, batch, "block.01", **options)
    assert torch.equal(rows_seen(geometry, "block.01")[1], ids[keep])


def test_functions_of_the_batch_need_a_call_and_must_return_a_tensor():
    model, batch = gpt_neox().eval(), token_batch()
    with pytest.raises(TypeError, match="mask= must return a tensor; got list"):
        observed(model, batch, mask=lambda b: b["input_ids"].tolist())
    parts = nn.ModuleDict({"layers": nn.ModuleList([linear_block(4)])})
    message = "mask= can be a function of the batch only where the model is called"
    with pytest.raises(ValueError, match=message), observe(parts, mask=lambda b: b):
        parts["layers"][0](torch.randn(2, 5, 4))


def test_what_a_pass_through_a_wrapper_around_the_model_changes_of_it_is_put_back():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        wrapper = DistributedDataParallel(model)
        with kept_state(model), torch.no_grad():
            wrapper(torch.ones(2))
        assert wrapper.require_forward_param_sync  # of buffers, too
    finally:
        dist.destroy_process_group()


SEEN_BY_HOOKS = []


class Listener:
    def __init__(self):
        self.seen = []
        self.args = 0  # of a command line, say

    def __call__(self, *call):
        self.seen.append(call)

    hear = __call__


def test_what_hooks_have_noted_of_a_pass_is_taken_from_their_notes():
    model, noted, called, bound = nn.Linear(2, 2), [0], Listener(), Listener()
    model.register_forward_hook(lambda *call: noted.append(call))
    model.register_forward_pre_hook(lambda *call: SEEN_BY_HOOKS.append(call))
    model.register_forward_hook(called)
    model.register_forward_hook(bound.hear)
    model.register_forward_hook(partial(lambda notes, *call: notes.append(call), noted))
    model.register_forward_hook(lambda *call: None if len(noted) else later)
    with kept_state(model):
        model(torch.ones(2))
    later = None
    assert noted == [0]
    assert SEEN_BY_HOOKS == called.seen == bound.seen == []


class Stubborn(list):
    def clear(self):
        raise OSError(self)


def test_what_a_pass_has_resized_is_put_back_where_something_else_cannot_be():
    model = nn.Module()
    model.register_buffer("least", torch.empty(0))  # as an observer's of quantization
    model.notes = Stubborn()
    model.scale = torch.ones(2)
    refused = pytest.raises(OSError, match="tensor")
    with refused, kept_state(model):
        model.least.resize_(3).fill_(1)
        model.notes.append(model.scale.zero_())
    assert not len(model.least)
    assert model.scale.all()


def test_a_tensor_as_large_as_a_data_set_is_not_copied():
    model = nn.Linear(2, 2)
    model.text = text = torch.zeros(()).expand(2**48)  # no memory holds a copy
    with kept_state(model):
        model(torch.ones(2))
    assert model.text is text


# ── Copies and replicas
# ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_copy_made_while_the_model_is_measured_is_its_own_and_is_never_counted():
    model, batch = gpt_neox().eval(), token_batch()
    with observe(model, "block.02", kept_rows) as geometry, torch.no_grad():
        twin = copy.deepcopy(model)
        saved = io.BytesIO()
        torch.save(model, saved)
        model(**batch)
        twin(**batch)
        twin.forward(**batch)
    with geometry.probe, torch.no_grad():
        twin(**batch)
    assert len(rows_seen(geometry, "block.02")[0]) == 48
    with observe(twin, "block.02", kept_rows) as of_twin, torch.no_grad():
        twin(**batch)
    assert len(rows_seen(of_twin, "block.02")[0]) == 48
    saved.seek(0)
    for other in (twin, torch.load(saved, weights_only=False)):
        assert [type(module) for module in other.modules()] == [
            type(module) for module in model.modules()
        ]
        torch.nn.init.zeros_(other.get_output_embeddings().weight)
        assert not other.forward(**batch).logits.any()
        assert not other(**batch).logits.any()
    assert type(model) is type(gpt_neox())
    assert model(**batch).logits.any()


def test_two_probes_may_end_in_any_order():
    model, batch = gpt_neox().eval(), token_batch(padding="left")
    with observe(model, "block.02", kept_rows) as first:
        second = observe(model, "block.01", kept_rows)
        inner = second.__enter__()
        model.forward(**batch)
    model.forward(**batch)
    second.__exit__(None, None, None)
    model.forward(**batch)
    assert len(rows_seen(first, "block.02")[0]) == 36
    assert len(rows_seen(inner, "block.01")[0]) == 2 * 36


class Total(torchmetrics.SumMetric):
    def update(self, embeddings):
        self.sum_value += embeddings.double().sum()

    def compute(self):
        return {"total": self.sum_value}


class WithLoss(nn.Module):
    """A loss around a model, with layers of the model inside."""

    def __init__(self):
        super().__init__()
        self.model, self.criterion = gpt_neox(), nn.Identity()

    def forward(self, **batch):
        return self.criterion(self.model(**batch, labels=batch["input_ids"]).loss)


@pytest.mark.parametrize(
    ("family", "place", "error"),
    [
        ("t5", "decoder.block.1", torch.OutOfMemoryError),
        ("t5", "decoder.block.1", KeyboardInterrupt),
        ("in a loss", "criterion", torch.OutOfMemoryError),
    ],
)
def test_a_forward_pass_that_raises_counts_nowhere(family, place, error):
    def make(dim):
        return [*default_metrics(dim), Total()]

    def measured(run):
        layers = "*block.01"
        with observe(model, layers, make, jackknife=2) as geometry, torch.no_grad():
            run()
        return repr(geometry.records())

    def fail(*call):
        raise error

    def retried():
        for batch in batches:
            hook = model.get_submodule(place).register_forward_pre_hook(fail)
            with pytest.raises(error):
                model(**batches[1])
            hook.remove()
            model(**batch)

    in_a_loss = family == "in a loss"
    model = WithLoss() if in_a_loss else FAMILIES[family].build().eval()
    batches = [token_batch(rows, padding="left") for rows in (3, 2)]
    if family == "t5":
        batches = [{**batch, "decoder_input_ids": batch["input_ids"]} for batch in batches]
    assert measured(retried) == measured(lambda: [model(**batch) for batch in batches])


def test_a_pass_after_a_change_of_the_weights_in_a_step_does_not_count_and_is_told_once(caplog):
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=0.1), linear_block(4))
    optimizer, ids = torch.optim.SGD(model.parameters(), 0.1), torch.arange(6).view(2, 3)
    monitor = StepMonitor(model, 2, layers="1", window=2, measure_last=False)
    with caplog.at_level("INFO"), monitor:
        for step in range(4):
            with monitor.step(step):
                for passes in (2, 1):
                    for _ in range(passes):
                        model(ids).sum().backward()
                    optimizer.step()
    assert row_counts(monitor) == [24.0] * 2
    assert caplog.text.count("as the second one of SAM, are not measured") == 1


# as adversarial training of the embeddings does; behind a LayerNorm each row's gradient sums to 0
@pytest.mark.parametrize("change", [[1.0, 1.0, 1.0, 1.0], [1.0, -1.0, 1.0, -1.0]])
def test_a_pass_after_a_change_by_data_does_not_count(change):
    model = nn.Sequential(nn.Embedding(10, 4), linear_block(4))
    table, ids = model[0].weight, torch.arange(6).view(2, 3)
    table.data = table.data.mul(64).round().div(64)
    with StepMonitor(model, 1, layers="1", measure_last=False) as monitor:
        for _ in range(2):  # also in another batch of the step
            with monitor.step(0):
                model(ids).sum().backward()
                table.data.add_(torch.tensor(change))
                model(ids).sum().backward()
    assert row_counts(monitor) == [6.0]


class Waits(nn.Module):
    """A block in which one thread waits for another one to have run the model."""

    def forward(self, x):
        if threading.current_thread() is not threading.main_thread():
            self.inside.set()
            self.other.wait(60)
        return x


@pytest.mark.parametrize("no_grad", [False, True])
def test_passes_of_two_threads_are_no_loop(no_grad):
    model, ids = nn.Sequential(nn.Embedding(9, 4), Waits(), linear_block(4)), torch.arange(9)
    Waits.inside, Waits.other = threading.Event(), threading.Event()
    monitor = StepMonitor(model, 1, layers=["1", "2"], measure_last=False, on_error="raise")
    with monitor, monitor.step(0):
        first = threading.Thread(target=model, args=(ids,))
        first.start()
        Waits.inside.wait(60)
        told = nullcontext() if no_grad else pytest.raises(ValueError, match="another thread")
        with torch.set_grad_enabled(not no_grad), told:
            model(ids)
        Waits.other.set()
        first.join()
    if no_grad:
        assert row_counts(monitor) == [9.0, 9.0]


class Gives(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return x.to_sparse() if self.kind == "sparse" else torch.nested.as_nested_tensor([*x])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["sparse", "nested", "meta"])
def test_a_hidden_state_that_is_not_dense_is_refused(kind):
    inner = Gives(kind) if kind != "meta" else linear_block(4)
    model = nn.Sequential(nn.Embedding(9, 4), inner).to("meta" if kind == "meta" else "cpu")
    ids = torch.zeros(2, 3, dtype=torch.int64, device="meta" if kind == "meta" else "cpu")
    told = pytest.raises(TypeError, match=f"dense hidden state.*{kind}")
    with told, observe(model, layers="1"):
        model(ids)


def test_weights_that_a_pass_replaces_or_limits_are_put_back_and_one_changed_in_place_is_named():
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=0.1), nn.Linear(4, 4))
    before = copy.deepcopy(model.state_dict())
    with kept_weights(model):
        model(torch.arange(10))
        model[1].weight.data = 2 * model[1].weight.data
        model[1].bias = nn.Parameter(torch.ones(4))
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    named = pytest.raises(ValueError, match=r"'1\.bias' was changed")
    with named, kept_weights(model), torch.no_grad():
        model[1].bias.add_(1)


class MergesInEval(nn.Linear):
    is_merged = False

    def forward(self, x):
        if self.is_merged == self.training:
            self.is_merged = not self.training
            self.weight.data += 1 if self.is_merged else -1
        self.log = None
        return super().forward(x)


@pytest.mark.parametrize("width", [3, 2])  # the second one fails after the change
def test_what_a_model_has_noted_of_a_change_of_its_weights_stays_so_that_it_undoes_it(width):
    model = MergesInEval(3, 3)
    torch.nn.init.zeros_(model.weight)
    named = pytest.raises(ValueError, match="'weight' was changed")
    with named, kept_state(model), kept_weights(model):
        model.eval()(torch.ones(width))
    assert "log" not in vars(model)  # all else is put back
    model.train()(torch.ones(3))
    assert not model.weight.any()


class AsksForItsClass(type(gpt_neox())):
    """A model whose forward is written with the class of the instance."""

    def forward(self, **batch):
        assert type(self) is AsksForItsClass
        forward = self.forward
        assert getfullargspec(forward) == getfullargspec(AsksForItsClass.forward)
        assert forward.__code__.co_varnames[:2] == ("self", "batch")
        assert [*signature(forward).parameters] == ["batch"]
        return super(type(self), self).forward(**batch)


@pytest.mark.parametrize("has_own", [False, True])
def test_a_watched_model_is_of_its_own_class_and_copies_call_their_own_forward(has_own):
    config = gpt_neox().config
    model, batch = AsksForItsClass(config).eval(), token_batch()
    if has_own:  # as wrappers of others give it
        model.forward = type(model).forward.__get__(model)
    names = set(vars(model)), set(vars(type(model)))
    with observe(model, "block.02", kept_rows) as geometry, torch.no_grad():
        twin = copy.deepcopy(model)
        torch.nn.init.zeros_(twin.get_output_embeddings().weight)
        assert not twin.forward(**batch).logits.any()
        assert model.forward(**batch).logits.any()
        with observe(model, "block.01", kept_rows) as of_other:
            model(**batch)
        # as Lightning does while it calls another method by the model's forward
        model.forward = model.forward
        model(**batch)
    assert len(rows_seen(geometry, "block.02")[0]) == 3 * 48
    assert len(rows_seen(of_other, "block.01")[0]) == 48
    assert set(vars(model)) - {"forward"} == names[0] - {"forward"}
    assert set(vars(type(model))) == names[1]
    assert model.forward.__func__ is AsksForItsClass.forward
    assert model(**batch).logits.any()
