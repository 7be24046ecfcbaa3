"""The examples with a loop of one's own: what is measured."""

import runpy
import sys
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from unittest import mock

import pandas as pd
import pytest
import torch

from embedgeo import StepMonitor, observe
from embedgeo.text import builtin_corpus
from tests.docs import blocks
from tests.files import ROOT, events_of
from tests.ranks import on_two_ranks
from tests.training.runs import moments, steps

EXAMPLES = ROOT / "examples"
TOPICS = builtin_corpus()[:12]
LAYERS = ["embed", "block.00", "block.01", "block.02", "block.03", "final_norm"]
FORWARD = {
    "plain_loop.py": lambda model, batch: model(*batch),
    "accelerate_loop.py": lambda model, batch: model(**batch),
    "torchtitan_llama.py": lambda model, batch: model(batch[0]),
}


def require_no_triton():
    """Stand in for torchtitan's kernels of mixtures of experts, which Llama does not call, with
    torch for CPUs.
    """
    if find_spec("triton") is None:
        sys.modules.setdefault("torchtitan.models.moe.kernels", mock.MagicMock())


class Recording(StepMonitor):
    """Keeps the weights at the start of each step and the batches in it."""

    def __init__(self, *args, **options):
        super().__init__(*args, on_error="raise", **options)
        self.steps = {}

    def step(self, step, batch=None):
        self.steps.setdefault(step, (deepcopy(self._model.state_dict()), []))[1].append(batch)
        return super().step(step, batch)


@pytest.fixture
def run(monkeypatch, tmp_path, unpainted):
    """Runs a script as ``python examples/NAME --out FOLDER …`` does; returns its variables and its
    folder.
    """
    require_no_triton()
    monkeypatch.setattr("embedgeo.text.builtin_corpus", lambda: TOPICS)

    def run(name, *arguments, out="run"):
        monkeypatch.setattr("embedgeo.StepMonitor", Recording)
        monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path / out), *arguments])
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__"), tmp_path / out

    return run


@pytest.mark.parametrize("name", FORWARD)
def test_a_recipe_measures_what_observe_does(run, printed, name):
    brief = "--max-steps", "4", "--every-n-steps", "2"
    trained, folder = run(name, *brief)
    monitor, model = trained["monitor"], trained["model"]
    history = pd.DataFrame(monitor.history)
    assert list(dict.fromkeys(history["layer"])) == [*LAYERS, "mean"]
    assert {0, 2, 4} <= set(history["step"])
    weights, batches = monitor.steps[2]
    model.load_state_dict(weights)
    with observe(model) as geometry:
        for batch in batches:
            FORWARD[name](model, batch)
    at_2 = history[history["step"] == 2]
    for layer, expected in geometry.compute().items():
        values = at_2[at_2["layer"] == layer]
        assert dict(zip(values["metric"], values["value"], strict=True)) == pytest.approx(
            expected, rel=1e-9, nan_ok=True
        )
    assert geometry.compute()["block.03"]["token_types"] > 100

    assert f"embedgeo report {folder}" in printed()
    assert set(pd.read_parquet(folder / "history.parquet")["step"]) == set(history["step"])
    events = events_of(next(folder.rglob("events.out.*")).parent)
    assert {"geometry.anisotropy/block.03", "loss"} <= set(events.Tags()["scalars"])


def test_a_plain_loop_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(run):
    schedule = "--every-n-steps", "2", "--bf16"
    whole, folder = run("plain_loop.py", "--max-steps", "6", *schedule)
    run("plain_loop.py", "--max-steps", "3", *schedule, out="parts")
    resumed, parts = run("plain_loop.py", "--max-steps", "6", "--resume", *schedule, out="parts")
    final = resumed["model"].state_dict()
    assert all(torch.equal(value, final[key]) for key, value in whole["model"].state_dict().items())
    assert steps(resumed["monitor"]) == [4, 6]
    expected, found = (pd.read_parquet(each / "history.parquet") for each in (folder, parts))
    pd.testing.assert_frame_equal(found[found["step"] != 3].reset_index(drop=True), expected)
    assert set(found["step"]) == {*expected["step"], 3}  # the last weights of the first part


def titan():
    """torchtitan's Llama, and token ids for it."""
    require_no_triton()
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs

    torch.manual_seed(0)
    model = Transformer(
        TransformerModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=128, max_seq_len=32)
    )
    with torch.no_grad():
        model.init_weights()
    return model, torch.randint(0, 128, (4, 32))


def titan_on_rank(rank):
    """What a monitor measures of it under torchtitan's own tensor and sequence parallelism."""
    model, token_ids = titan()
    from torchtitan.distributed import parallel_dims
    from torchtitan.models.llama3.infra.parallelize import apply_tp

    parallel_dims.device_type = "cpu"
    sizes = {
        "dp_replicate": 1,
        "dp_shard": 1,
        "cp": 1,
        "tp": 2,
        "pp": 1,
        "ep": 1,
        "etp": 1,
        "world_size": 2,
    }
    dims = parallel_dims.ParallelDims(**sizes)
    apply_tp(model, dims.get_mesh("tp"), loss_parallel=False, enable_float8_tensorwise_tp=False)
    names = {"model": model, "parallel_dims": dims}
    names["StepMonitor"] = partial(StepMonitor, metrics=moments, on_error="raise")
    # it needs ranks, so not python, which is run on one
    (shown,) = blocks.blocks("docs/how-to/recipes.md", "text")
    exec(shown.code, names)
    monitor = names["monitor"]
    with monitor.step(0):
        model(token_ids).square().mean().backward()
    monitor.close()
    return {"mesh": names["names"], "history": [*monitor.history]}


def test_torchtitans_own_mesh_and_tensor_parallel_plan(tmp_path):
    model, token_ids = titan()
    with observe(model, metrics=moments) as geometry:
        model(token_ids)
    expected = {
        (layer, key): v for layer, values in geometry.compute().items() for key, v in values.items()
    }
    for rank in on_two_ranks(titan_on_rank, tmp_path):
        layers = [r for r in rank["history"] if r["step"] == 0 and r["layer_index"] >= 0]
        found = {(r["layer"], r["metric"]): r["value"] for r in layers}
        assert rank["mesh"] == ["tp"]
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-6, nan_ok=True)
