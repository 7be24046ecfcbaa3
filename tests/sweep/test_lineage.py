"""Runs that are really trained, whole and with planted faults, on a Hub and in folders."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from embedgeo.checkpoints.lineage import choose_tensors, correlations, relative_distances
from embedgeo.checkpoints.ranges import WeightRanges
from embedgeo.checkpoints.sources import list_checkpoints
from embedgeo.report import write_report
from embedgeo.sweep import check
from tests.files import Payload
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import TEXT, bin_file, write_files
from tests.sweep.trained import STEPS, files_of, trained

REPOSITORY = "lab/run"
CLEAN = [("adamw", 1e-3), ("adamw", 1e-2), ("sgd", 1.0)]


def from_other_seed(step):
    return lambda run: run | {step: trained(1)[step]}


def from_other_steps(taken):
    return lambda run: run | {step: run[source] for step, source in taken.items()}


def one_matrix_of_noise(run):
    name = "gpt_neox.layers.3.mlp.dense_h_to_4h.weight"
    assert name in run[32]
    noise = torch.randn(run[32][name].shape, generator=torch.Generator().manual_seed(0))
    return run | {32: run[32] | {name: 0.02 * noise}}


def one_matrix_of_another_step(run):
    name = "gpt_neox.embed_in.weight"
    return run | {32: run[32] | {name: run[160][name]}}


def one_matrix_of_another_run(run):
    name = "gpt_neox.layers.3.mlp.dense_h_to_4h.weight"
    return run | {160: run[160] | {name: trained(1)[160][name]}}


def one_value_is_nan(run):
    name = "gpt_neox.layers.3.mlp.dense_h_to_4h.weight"
    broken = run[32][name].clone()
    broken[0, 3] = torch.nan
    return run | {32: run[32] | {name: broken}}


def all_zeros(run):
    return run | {160: {name: torch.zeros_like(value) for name, value in run[160].items()}}


def twice_as_large(run):
    return run | {96: {name: 2 * value for name, value in run[96].items()}}


FAULTS = {
    "another seed in the middle": (from_other_seed(80), ["jump: step80:"]),
    "another seed at two steps in a row": (
        lambda run: run | {80: trained(1)[80], 88: trained(1)[88]},
        ["jump: step80, step88:"],
    ),
    "another seed at the start": (from_other_seed(0), ["does not descend: step1, step0:"]),
    "another seed at the end": (from_other_seed(160), ["does not descend: step160, step152:"]),
    "another seed from a step on": (
        lambda run: {step: trained(1)[step] if step >= 96 else run[step] for step in run},
        ["does not descend: step96, step88:"],
    ),
    "the last weights early": (
        from_other_steps({72: 160, 96: 160}),
        ["same weights: step72, step96, step160", "jump: step72:", "jump: step96:"],
    ),
    "later weights at an early step": (
        lambda run: run | {8: {name: value + 1e-6 for name, value in run[120].items()}},
        ["jump: step8:"],
    ),
    "one matrix of noise": (one_matrix_of_noise, ["jump: step32:"]),
    "one matrix of another step": (one_matrix_of_another_step, ["same tensor: step32, step160:"]),
    "one matrix of another run at the end": (
        one_matrix_of_another_run,
        ["does not descend: step160, step152:"],
    ),
    "a NaN": (one_value_is_nan, ["not finite: step32:"]),
    "zeros": (all_zeros, ["constant: step160:"]),
    "twice as large": (twice_as_large, ["jump: step96:"]),
}


def put(hub, run, **options):
    for step, weights in run.items():
        hub.add(REPOSITORY, f"step{step}", files_of(weights, **options))


def found(capsys):
    """The lines about faults."""
    kinds = ("same", "not finite", "constant", "jump", "does not descend", "not read")
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(kinds)]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else(fault, hub, capsys):
    plant, expected = FAULTS[fault]
    put(hub, plant(trained()))
    assert check(REPOSITORY, lineage=True) == 1
    lines = found(capsys)
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "lr"), CLEAN)
def test_nothing_is_found_in_twenty_clean_checkpoints(optimizer, lr, hub, capsys):
    assert len(STEPS) == 20
    put(hub, trained(0, optimizer, lr))
    assert check(REPOSITORY, lineage=True) == 0
    assert found(capsys) == []


def write_run(folder, run):
    for step, weights in run.items():
        target = write_files(folder / f"step{step}", {"config.json": b"{}"})
        save_file(
            {name: value.contiguous() for name, value in weights.items()},
            target / "model.safetensors",
        )


@pytest.mark.slow
def test_a_few_values_that_round_the_other_way_are_no_jump(tmp_path, capsys):
    run = trained(0, "adamw", 1e-6)  # of which bfloat16 shows next to nothing
    write_run(
        tmp_path,
        {step: {n: v.bfloat16() for n, v in weights.items()} for step, weights in run.items()},
    )
    check(str(tmp_path), lineage=True)
    assert [line for line in found(capsys) if line.startswith("jump")] == []


@pytest.mark.slow
def test_a_jump_is_found_in_bfloat16(tmp_path, capsys):
    run = trained() | {80: trained()[160]}
    write_run(
        tmp_path,
        {step: {n: v.bfloat16() for n, v in weights.items()} for step, weights in run.items()},
    )
    assert check(str(tmp_path), lineage=True) == 1
    assert [line.split(":")[1] for line in found(capsys) if line.startswith("jump")] == [" step80"]


def rare_tokens():
    """A run that sees tokens of the first rows of its embedding, which are those that are read, in
    one step alone.
    """
    torch.manual_seed(0)
    names = {
        "wte": torch.nn.Embedding(6000, 32),
        "h": torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3)),
    }
    model = torch.nn.ModuleDict({**names, "head": torch.nn.Linear(32, 6000, bias=False)})
    stepper = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    run = {}
    for step in range(9):
        run[step] = {name: value.clone() for name, value in model.state_dict().items()}
        ids = torch.randint(0 if step == 3 else 3000, 6000, (64,))
        hidden = model["wte"](ids)
        for block in model["h"]:
            hidden = hidden + torch.tanh(block(hidden))
        torch.nn.functional.cross_entropy(model["head"](hidden), ids).backward()
        stepper.step()
        stepper.zero_grad()
    return run


def test_rows_of_tokens_that_were_not_seen_may_stay_as_they_are(tmp_path, capsys):
    run = rare_tokens()
    assert torch.equal(run[0]["wte.weight"][:2048], run[3]["wte.weight"][:2048])
    assert not torch.equal(run[3]["wte.weight"][:2048], run[4]["wte.weight"][:2048])
    write_run(tmp_path / "clean", run)
    assert check(str(tmp_path / "clean"), lineage=True) == 0
    assert found(capsys) == []
    write_run(tmp_path / "mixed", run | {7: run[7] | {"wte.weight": run[1]["wte.weight"]}})
    assert check(str(tmp_path / "mixed"), lineage=True) == 1
    assert found(capsys)[0].startswith("same tensor: step0, step1, step2, step3, step7:")


@pytest.mark.parametrize("step", [1, 160])
@pytest.mark.slow
def test_a_run_of_two_checkpoints_is_judged_by_their_correlation(step, hub, capsys):
    put(hub, {0: trained()[0], step: trained()[step]})
    assert check(REPOSITORY, lineage=True) == 0
    put(hub, {0: trained(1)[0]})
    assert check(REPOSITORY, lineage=True) == 1
    assert found(capsys)[0].startswith(f"does not descend: step{step}, step0:")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"shards": True}, {"as_bin": True}])
def test_other_formats_are_read_alike(options, hub, capsys):
    run = {step: weights for step, weights in trained().items() if step in (0, 32, 64, 72, 80)}
    put(hub, run, **options)
    assert check(REPOSITORY, lineage=True) == 0
    put(hub, {64: trained(1)[64]}, **options)
    assert check(REPOSITORY, lineage=True) == 1
    assert found(capsys)[0].startswith("jump: step64:")


def test_folders_give_what_the_hub_gives(hub, tmp_path, capsys):
    run = {step: trained()[step] for step in (0, 8, 64)}
    put(hub, run)
    check(REPOSITORY, lineage=True)
    on_the_hub = capsys.readouterr().out
    for step, weights in run.items():
        write_files(tmp_path / f"step{step}", files_of(weights))
    check(str(tmp_path), lineage=True)
    assert capsys.readouterr().out == on_the_hub


def test_the_table_has_the_distances(tmp_path, capsys):
    run = {step: trained()[step] for step in (0, 8, 64)}
    for step, weights in run.items():
        write_files(tmp_path / f"step{step}", files_of(weights))
    assert check(str(tmp_path), lineage=True) == 0
    rows = [
        line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("step")
    ]
    names = choose_tensors({name: tuple(value.shape) for name, value in run[0].items()})

    def distance(a, b):
        pairs = [(run[a][name].double(), run[b][name].double()) for name in names]
        return np.mean([float((x - y).norm() / (x.norm() * y.norm()).sqrt()) for x, y in pairs])

    def correlation(a, b):
        flat = [
            (run[a][name].double().flatten().numpy(), run[b][name].double().flatten().numpy())
            for name in names
        ]
        return np.mean([np.corrcoef(x, y)[0, 1] for x, y in flat])

    for name, far, alike, near in rows[1:]:
        step = int(name.removeprefix("step"))
        assert float(far) == pytest.approx(distance(step, 0), rel=1e-3)
        assert float(alike) == pytest.approx(correlation(step, 0), abs=1e-4)
        assert float(near) == pytest.approx(distance(step, {8: 0, 64: 8}[step]), rel=1e-3)


def test_only_the_start_of_a_few_tensors_is_read(hub, tmp_path):
    generator = torch.Generator().manual_seed(0)
    start = {f"h.{i}.mlp.weight": torch.randn(512, 1024, generator=generator) for i in range(8)}
    size = 0
    for step in (0, 1, 2):
        weights = {name: value + 0.01 * step for name, value in start.items()}
        save_file(weights, tmp_path / "model.safetensors")
        data = (tmp_path / "model.safetensors").read_bytes()
        size += len(data)
        hub.add(REPOSITORY, f"step{step}", {"model.safetensors": data, "config.json": b"{}"})
    assert check(REPOSITORY, lineage=True) == 0
    assert hub.num_sent["model.safetensors"] <= 3 * (2**17 + 3 * 4 * 2**16)
    assert hub.num_sent["model.safetensors"] < 0.1 * size


def test_a_server_error_is_tried_again_and_a_checkpoint_that_cannot_be_read_is_named(hub, capsys):
    put(hub, {step: trained()[step] for step in (0, 8, 64)})
    commits = hub.repositories[REPOSITORY]["branches"]
    hub.fail("model.safetensors", commits["step8"], 503)
    assert check(REPOSITORY, lineage=True) == 0
    hub.commits[commits["step64"]]["model.safetensors"] = b"\xff" * 1000
    assert check(REPOSITORY, lineage=True) == 3
    (line,) = found(capsys)
    assert line.startswith(
        "not read: step64: model.safetensors cannot be read: its header must be shorter"
    )


def test_what_torch_saved_in_the_old_format_is_refused_with_the_remedy(tmp_path, capsys):
    for step in (0, 1):
        folder = write_files(tmp_path / f"step{step}", {"config.json": b"{}"})
        torch.save(
            trained()[step], folder / "pytorch_model.bin", _use_new_zipfile_serialization=False
        )
    assert check(str(tmp_path), lineage=True) == 3
    assert "Load it and save it as safetensors" in found(capsys)[0]


def test_a_pickle_payload_among_weights_is_passed_over(tmp_path, capsys):
    target = tmp_path / "executed"
    for step in (0, 8):
        stored = trained()[step] | {"a": Payload(str(target)), "b": [Payload(str(target))]}
        write_files(
            tmp_path / f"run/step{step}",
            {"config.json": b"{}", "pytorch_model.bin": bin_file(stored)},
        )
    assert check(str(tmp_path / "run"), lineage=True) == 0
    assert not target.exists()
    assert found(capsys) == []


def test_other_shapes_are_not_compared(tmp_path, capsys):
    for step in (0, 1, 2):
        folder = write_files(tmp_path / f"step{step}", {"config.json": b"{}"})
        size = 9 if step == 1 else 8
        save_file({"h.0.weight": torch.randn(size, 8)}, folder / "model.safetensors")
    check(str(tmp_path), lineage=True)
    assert "not read: step1: its tensors have other names or shapes" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("as_bin", [False, True])
def test_tensors_are_those_that_were_saved(dtype, as_bin, tmp_path):
    values = torch.randn(7, 5, dtype=torch.float64)
    weights = {
        "whole": values.to(dtype),
        "rows": values.to(dtype)[2:].clone(),
        "ids": torch.arange(4),
    }
    if as_bin:
        both = torch.nn.Parameter(values.to(dtype))
        stored = weights | {"view": both.detach()[3:], "turned": both.detach().T, "same": both}
        write_files(
            tmp_path / "step0", {"config.json": b"{}", "pytorch_model.bin": bin_file(stored)}
        )
        weights |= {"view": both.detach()[3:], "same": both.detach()}
    else:
        write_files(tmp_path / "step0", {"config.json": b"{}"})
        save_file(weights, tmp_path / "step0" / "model.safetensors")
    (checkpoint,) = list_checkpoints(str(tmp_path))
    ranges = WeightRanges(checkpoint, checkpoint.contents())
    tensors = ranges.tensors()
    assert tensors.keys() == weights.keys() - {"ids"}
    for name, tensor in tensors.items():
        assert torch.equal(ranges.values(tensor, 12), weights[name].double().flatten()[:12])
        assert tensor.shape == weights[name].shape


def test_distances_are_those_of_a_loop():
    values = np.random.default_rng(0).normal(size=(4, 50))
    values[3] = values[1]
    distances, alike = relative_distances(values), correlations(values)
    for i in range(4):
        for j in range(4):
            scale = np.sqrt(np.linalg.norm(values[i]) * np.linalg.norm(values[j]))
            assert distances[i, j] == pytest.approx(np.linalg.norm(values[i] - values[j]) / scale)
            assert alike[i, j] == pytest.approx(np.corrcoef(values[i], values[j])[0, 1])
    assert distances[1, 3] == 0
    assert np.isnan(relative_distances(np.array([[0.0, 0.0], [1.0, 2.0]]))[0, 1])


@pytest.fixture
def shared(hub, tmp_path):
    """A run of three steps in several files, the first of which step 8 has from step 64; the
    options of a sweep.
    """
    put(hub, {step: trained()[step] for step in (0, 8, 64)}, shards=True)
    commits = hub.repositories[REPOSITORY]["branches"]
    files = hub.commits[commits["step8"]]
    name = next(name for name in sorted(files) if name.startswith("model-00001"))
    files[name] = hub.commits[commits["step64"]][name]
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXT))
    return name, {"text": str(text), "num_tokens": 64, "seq_len": 16, "out": str(tmp_path / "out")}


@pytest.mark.slow
def test_a_sweep_and_its_report_point_out_a_file_that_is_shared(shared, capsys):
    name, options = shared
    line = f"shared: step64, step8 have the same {name}"
    assert sweep(REPOSITORY, **options) == 0
    assert line in capsys.readouterr().out
    assert sweep(REPOSITORY, **options) == 0  # from what the folder says
    assert line in capsys.readouterr().out
    page = write_report([Path(options["out"])]).read_text()
    assert "Shared weight files" in page
    assert f"{name}: step64, step8" in page
    assert json.loads((Path(options["out"]) / "manifest.json").read_text())["asked"]["model"] == [
        REPOSITORY
    ]
