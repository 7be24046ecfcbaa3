import math
import pickle
import random
import warnings

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

import embedgeo
from embedgeo import EmbeddingMoments, GeometryMonitor, TokenMoments, log_spaced_steps, observe
from tests.ranks import WORLD_SIZE, on_two_ranks
from tests.test_geometry import hooks
from tests.training import TinyLM, ValidatedLM, fit, loader

LAYERS = ["embed", "block.00", "block.01", "block.02", "final_norm"]


def moments(dim):
    return [EmbeddingMoments(dim)]


def steps(monitor):
    return sorted({record["step"] for record in monitor.history})


def value(monitor, step, layer, metric):
    (found,) = (
        r["value"] for r in monitor.history if r["step"] == step and r["layer"] == layer and r["metric"] == metric
    )
    return found


def random_state():
    return torch.get_rng_state(), random.getstate(), pickle.dumps(np.random.get_state())  # noqa: NPY002


def test_log_spaced_steps_are_pythias():
    assert log_spaced_steps() == (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@pytest.mark.parametrize("with_probe", [False, True])
def test_training_is_bit_for_bit_the_same_with_the_monitor(tmp_path, with_probe):
    def outcome(*callbacks):
        module, run = fit(tmp_path, *callbacks, max_steps=30, accumulate_grad_batches=2)
        optimizer = run.optimizers[0].state_dict()["state"]
        moments = [tensor for state in optimizer.values() for tensor in state.values()]
        return [*module.state_dict().values(), *moments, *module.losses], random_state()

    probe = loader(16, seed=1, shuffle=True) if with_probe else None
    monitor = GeometryMonitor(every_n_steps=5, probe=probe, on_error="raise")
    (plain, plain_state), (monitored, monitored_state) = outcome(), outcome(monitor)
    assert len(plain) == len(monitored) > 100
    assert all(torch.equal(a, b) for a, b in zip(plain, monitored, strict=True))
    assert torch.equal(plain_state[0], monitored_state[0])
    assert plain_state[1:] == monitored_state[1:]
    assert steps(monitor) == [*range(0, 30, 5), *([30] if with_probe else [])]


def test_no_hook_is_on_the_model_between_measured_steps(tmp_path):
    class Spy(L.Callback):
        def __init__(self):
            self.hooks = {}

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.hooks[trainer.global_step] = hooks(pl_module)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert hooks(pl_module) == 0

    spy = Spy()
    fit(tmp_path, GeometryMonitor(every_n_steps=4, metrics=moments, on_error="raise"), spy, max_steps=10)
    assert [step for step, count in spy.hooks.items() if count] == [0, 4, 8]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_are_optimizer_steps_also_under_accumulation_and_after_a_resume(tmp_path, accumulate):
    options = {"accumulate_grad_batches": accumulate}
    whole = GeometryMonitor(every_n_steps=3, extra_steps=(1,), metrics=moments, on_error="raise")
    data = loader()
    fit(tmp_path, whole, max_steps=8, data=data, **options)
    first = GeometryMonitor(every_n_steps=3, extra_steps=(1,), metrics=moments, on_error="raise")
    checkpoint = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=4, save_top_k=-1)
    _, run = fit(tmp_path, first, checkpoint, max_steps=5, data=data, enable_checkpointing=True, **options)
    assert run.global_step == 5
    second = GeometryMonitor(every_n_steps=3, extra_steps=(1,), metrics=moments, on_error="raise")
    (saved,) = (tmp_path / "saved").glob("*step=4.ckpt")
    again = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=4, save_top_k=-1)
    fit(tmp_path, second, again, max_steps=8, ckpt_path=saved, data=data, enable_checkpointing=True, **options)
    assert steps(whole) == [0, 1, 3, 6]
    assert steps(first) == [0, 1, 3]
    assert steps(second) == [6]
    assert value(whole, 3, "embed", "n") == 48 * accumulate
    assert value(first, 3, "block.02", "V") == value(whole, 3, "block.02", "V")


def test_a_window_pools_the_steps_it_covers(tmp_path):
    seen = []

    class Batches(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append((trainer.global_step, batch["input_ids"]))

    monitor = GeometryMonitor(every_n_steps=5, window=3, on_error="raise")
    fit(tmp_path, monitor, Batches(), max_steps=10)
    assert steps(monitor) == [0, 5]
    types = torch.cat([ids.flatten() for step, ids in seen if 5 <= step < 8]).unique()
    assert value(monitor, 5, "embed", "n") == 3 * 48
    assert value(monitor, 5, "embed", "token_types") == len(types)


def test_sequences_can_be_the_rows(tmp_path):
    monitor = GeometryMonitor(every_n_steps=2, metrics=moments, rows="last", on_error="raise")
    fit(tmp_path, monitor, max_steps=3)
    assert {record["value"] for record in monitor.history if record["metric"] == "n"} == {4}


def test_an_unfinished_window_is_logged_when_training_ends(tmp_path):
    monitor = GeometryMonitor(every_n_steps=5, window=4, metrics=moments, on_error="raise")
    fit(tmp_path, monitor, max_steps=7)
    assert steps(monitor) == [0, 5]
    assert value(monitor, 5, "embed", "n") == 2 * 48


def test_the_probe_equals_observe_on_the_weights_of_that_step(tmp_path):
    class Weights(L.Callback):
        def __init__(self):
            self.at = {}

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.at.setdefault(trainer.global_step, {k: v.clone() for k, v in pl_module.state_dict().items()})

    probe, weights = loader(16, 8, seed=1, padding="left"), Weights()
    monitor = GeometryMonitor(every_n_steps=4, probe=probe, on_error="raise")
    module, _ = fit(tmp_path, monitor, weights, max_steps=8, accumulate_grad_batches=2)
    weights.at[8] = module.state_dict()
    for step in (0, 4, 8):
        offline = TinyLM().eval()
        offline.load_state_dict(weights.at[step])
        with observe(offline.model) as geometry, torch.no_grad():
            for batch in probe:
                offline.model(**batch)
        for layer, expected in geometry.compute().items():
            got = {r["metric"]: r["value"] for r in monitor.history if r["step"] == step and r["layer"] == layer}
            assert got == pytest.approx(expected, rel=1e-6, nan_ok=True), (step, layer)
    assert value(monitor, 0, "embed", "n") == 16 * 9


def test_probe_forward_and_batch_callables_override(tmp_path):
    class Tokens(TinyLM):
        def forward(self, batch):
            self.called = True
            return self.model(inputs_embeds=self.model.get_input_embeddings()(batch["input_ids"]))

    monitor = GeometryMonitor(
        every_n_steps=2,
        probe=loader(8),
        probe_forward=lambda pl_module, batch: pl_module(batch),
        token_ids=lambda batch: batch["input_ids"] * 0 + 7,
        mask=lambda batch: batch["input_ids"] % 2 == 0,
        on_error="raise",
    )
    module, _ = fit(tmp_path, monitor, module=Tokens(), max_steps=2)
    even = sum(int((batch["input_ids"] % 2 == 0).sum()) for batch in loader(8))
    assert module.called
    assert value(monitor, 0, "block.00", "token_types") == 1
    assert value(monitor, 0, "block.00", "n") == even


def test_validation_and_sanity_checking_are_left_alone(tmp_path):
    monitor = GeometryMonitor(every_n_steps=2, metrics=moments, on_error="raise")
    fit(
        tmp_path,
        monitor,
        module=ValidatedLM(),
        max_steps=6,
        val=loader(8),
        val_check_interval=2,
        num_sanity_val_steps=2,
    )
    assert {r["value"] for r in monitor.history if r["metric"] == "n"} == {48}


def test_scalars_reach_every_logger_under_the_contracts_tags(tmp_path):
    monitor = GeometryMonitor(every_n_steps=2, on_error="raise")
    loggers = [TensorBoardLogger(tmp_path, name="tb", version=""), CSVLogger(tmp_path, name="csv", version="")]
    _, run = fit(tmp_path, monitor, max_steps=5, logger=loggers)
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"scalars": 0}).Reload()
    tags = {tag for tag in events.Tags()["scalars"] if tag.startswith("geometry.")}
    metrics = {record["metric"] for record in monitor.history}
    assert tags == {f"geometry.{metric}/{layer}" for metric in metrics for layer in [*LAYERS, "mean"]}
    assert [event.step for event in events.Scalars("geometry.V/block.01")] == [0, 2, 4]
    assert events.Scalars("geometry.V/block.01")[1].value == pytest.approx(value(monitor, 2, "block.01", "V"))
    blocks = [value(monitor, 4, f"block.0{i}", "V") for i in range(3)]
    assert events.Scalars("geometry.V/mean")[-1].value == pytest.approx(sum(blocks) / 3)
    table = pd.read_csv(tmp_path / "csv" / "metrics.csv").set_index("step")
    assert table["geometry.V/mean"].dropna().loc[4] == pytest.approx(sum(blocks) / 3)
    assert run.callback_metrics["geometry.V/block.01"].item() == value(monitor, 4, "block.01", "V")
    assert set(monitor.history[0]) == {"step", "layer", "layer_index", "metric", "value"}


def test_tensorboard_gets_one_chart_per_metric(tmp_path):
    monitor = GeometryMonitor(every_n_steps=2, metrics=moments, prefix="g", on_error="raise")
    fit(tmp_path, monitor, max_steps=5, logger=TensorBoardLogger(tmp_path, name="tb", version=""))
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    (event,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category][:2] == ["g: at a glance", "g: size and variance"]
    charts = [chart for category in layout.category for chart in category.chart]
    shown = [tag for chart in charts for tag in chart.multiline.tag]
    assert sorted(shown) == sorted({rf"^g\.{r['metric']}\/" for r in monitor.history})
    assert shown[:3] == [r"^g\.V_W_over_V_unbiased\/", r"^g\.M_over_Q\/", r"^g\.mean_cosine\/"]
    assert [chart.title for chart in charts[1:3]] == ["M / Q (M_over_Q)", "mean cosine"]


def test_early_stopping_can_watch_the_geometry(tmp_path):
    stop = EarlyStopping("geometry.n/mean", patience=2, mode="max", check_on_train_epoch_end=False)
    options = {"max_steps": 50, "val": loader(4), "val_check_interval": 1}
    _, run = fit(tmp_path, GeometryMonitor(1, metrics=moments), stop, module=ValidatedLM(), **options)
    assert run.global_step < 10


@pytest.mark.parametrize("logger", [False, True])
def test_without_loggers_the_history_is_there(tmp_path, logger):
    monitor = GeometryMonitor(every_n_steps=2, metrics=moments, on_error="raise")
    fit(tmp_path, monitor, max_steps=3, logger=CSVLogger(tmp_path) if logger else False)
    assert steps(monitor) == [0, 2]


class Breaks(EmbeddingMoments):
    def update(self, embeddings, token_ids=None, mask=None):
        if len(embeddings):
            raise RuntimeError("broken metric")
        super().update(embeddings, token_ids, mask)


class BreaksLate(EmbeddingMoments):
    def compute(self):
        if self.n > 0:
            raise RuntimeError("broken metric")
        return super().compute()


@pytest.mark.parametrize("broken", [Breaks, BreaksLate])
@pytest.mark.parametrize("with_probe", [False, True])
def test_a_failure_in_a_metric_leaves_the_run_and_gives_one_warning(tmp_path, broken, with_probe):
    plain, _ = fit(tmp_path, max_steps=6)
    monitor = GeometryMonitor(2, metrics=lambda dim: [broken(dim)], probe=loader(8) if with_probe else None)
    with pytest.warns(UserWarning, match="GeometryMonitor") as caught:
        module, run = fit(tmp_path, monitor, max_steps=6)
    (warning,) = (str(w.message) for w in caught if "GeometryMonitor" in str(w.message))
    assert "layer 'embed'" in warning
    assert "RuntimeError: broken metric" in warning
    assert run.global_step == 6
    assert hooks(module) == 0
    assert monitor.history == []
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), module.parameters(), strict=True))


@pytest.mark.parametrize("broken", [Breaks, BreaksLate])
def test_a_failure_can_be_raised(tmp_path, broken):
    monitor = GeometryMonitor(2, metrics=lambda dim: [broken(dim)], on_error="raise")
    module = TinyLM()
    with pytest.raises(RuntimeError, match="broken metric"):
        fit(tmp_path, monitor, module=module, max_steps=6)
    assert hooks(module) == 0


def test_a_logger_that_raises_turns_monitoring_off(tmp_path):
    class Full(CSVLogger):
        def log_metrics(self, metrics, step=None):
            if "geometry.V/mean" in metrics:
                raise OSError("No space left on device")

    monitor = GeometryMonitor(2, metrics=moments)
    with pytest.warns(UserWarning, match="OSError: No space left on device"):
        _, run = fit(tmp_path, monitor, max_steps=6, logger=Full(tmp_path))
    assert run.global_step == 6
    assert steps(monitor) == [0]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_training_is_the_one_the_user_sees(tmp_path, error):
    class Stops(TinyLM):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 2:
                raise error("in the middle of an epoch")
            return loss

    module = Stops()
    with pytest.raises((error, SystemExit)) as caught:
        fit(tmp_path, GeometryMonitor(1, metrics=moments), module=module, max_steps=6)
    assert "in the middle" in str(caught.value) or error is KeyboardInterrupt
    assert hooks(module) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": -1}, "every_n_steps must be at least 1; got -1"),
        ({"every_n_steps": 0}, "every_n_steps must be at least 1; got 0"),
        ({"window": 0}, "window must be at least 1; got 0"),
        ({"window": 6, "every_n_steps": 5}, "5 steps on; got 6"),
        ({"window": 2, "extra_steps": (9,), "every_n_steps": 5}, "1 steps on; got 2"),
        ({"window": 2, "probe": []}, "must be 1 when a probe is given"),
        ({"extra_steps": (1, -2)}, "extra_steps must be at least 0; got -2"),
        ({"skip_first_positions": -1}, "skip_first_positions must not be negative"),
        ({"on_error": "ignore"}, "on_error must be"),
        ({"rows": "words"}, "rows must be one of 'tokens', 'mean', 'first', 'last'; got 'words'"),
    ],
)
def test_bad_arguments_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        GeometryMonitor(**options)


def test_a_probe_that_is_gone_after_one_pass_is_refused():
    with pytest.raises(TypeError, match="got an iterator"):
        GeometryMonitor(probe=iter([]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "*.mpl"}, "matches no layer"),
        ({"metrics": lambda dim: [TokenMoments(dim), EmbeddingMoments(dim)]}, "both give 'n'"),
    ],
)
def test_what_only_the_model_can_tell_is_refused_before_the_first_step(tmp_path, options, message):
    module = TinyLM()
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, GeometryMonitor(2, **options), module=module, max_steps=4)
    assert module.losses == []


def test_layers_that_no_forward_pass_reaches_are_named_once(tmp_path):
    monitor = GeometryMonitor(2, layers=["block.01", "gpt_neox.layers"], metrics=moments)
    with pytest.warns(UserWarning, match="GeometryMonitor") as caught:
        fit(tmp_path, monitor, max_steps=6)
    messages = [str(w.message) for w in caught if "GeometryMonitor" in str(w.message)]
    assert messages == ["GeometryMonitor: no forward pass reached gpt_neox.layers."]
    assert steps(monitor) == [0, 2, 4]


def train_on_rank(rank, folder, failing):
    warnings.simplefilter("ignore")
    metrics = embedgeo.default_metrics if failing is None else moments
    if failing == rank:
        metrics = lambda dim: [Breaks(dim)]  # noqa: E731
    monitor = GeometryMonitor(2, metrics=metrics)
    # each rank is a process already: Lightning is told so, or it would launch this program again for the other one
    launched = LaunchedProcess(rank)
    _, run = fit(folder / str(rank), monitor, max_steps=5, devices=2, strategy="ddp", plugins=[launched])
    return {"step": run.global_step, "world": run.world_size, "history": monitor.history}


class LaunchedProcess(LightningEnvironment):
    """One of two processes on this machine that were launched already."""

    creates_processes_externally = True

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.set_world_size(WORLD_SIZE)
        self.set_global_rank(rank)

    def local_rank(self):
        return self.rank


def launch(folder, failing):
    for rank in range(WORLD_SIZE):
        folder.joinpath(str(rank)).mkdir()
    return on_two_ranks(train_on_rank, folder, folder, failing)


def test_two_ranks_log_the_same_numbers_over_the_rows_of_both(tmp_path):
    first, second = launch(tmp_path, None)
    assert first["step"] == second["step"] == 5
    assert first["world"] == 2
    assert {r["step"] for r in first["history"]} == {0, 2, 4}
    assert {r["value"] for r in first["history"] if r["metric"] == "n"} == {96}
    for a, b in zip(first["history"], second["history"], strict=True):
        assert a == b or (math.isnan(a.pop("value")) and math.isnan(b.pop("value")) and a == b)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_rank_hangs_no_other(tmp_path, failing):
    first, second = launch(tmp_path, failing)
    assert first == second == {"step": 5, "world": 2, "history": []}
