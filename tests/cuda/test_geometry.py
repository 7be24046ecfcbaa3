"""A model on a GPU: hidden states, token ids and masks, from the hooks to the records."""

import pytest
import torch

from embedgeo import GeometryMonitor, StepMonitor, observe
from tests.cuda import GPU, needs_gpu
from tests.cuda.on_ranks import assert_same
from tests.models import albert, gpt_neox, t5, token_batch
from tests.training.runs import moments

OPTIONS = {
    "padding, positions and ids left out": {"skip_first_positions": 2, "ignore_token_ids": [5]}
}
SLOW = {
    "tokens": {},
    "mean": {"rows": "mean"},
    "last": {"rows": "last"},
    "words": {"rows": "words"},
    "the mean of two layers, and an inner module": {"layers": ["mean(last2)", "*.mlp"]},
    "jackknife": {"jackknife": 4},
}


def on_device(batch, device):
    return {key: value.to(device) for key, value in batch.items()}


def measured(device, build=gpt_neox, *, given_on=None, batches=2, **options):
    """The geometry over batches of a model in float64, whose hidden states are the same on all
    devices.
    """
    torch.manual_seed(0)
    model = build().double().eval().to(device)
    if options.get("rows") == "words":
        words = (torch.arange(12) // 2).expand(16, 12)
        options["word_ids"] = words.to(given_on or device)
    with observe(model, **options) as geometry, torch.no_grad():
        for i in range(batches):
            model(**on_device(token_batch(16, 12, seed=i, padding=None if i else "left"), device))
    return geometry


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        *OPTIONS.values(),
        *(pytest.param(options, marks=pytest.mark.slow) for options in SLOW.values()),
    ],
    ids=[*OPTIONS, *SLOW],
)
def test_records_are_those_of_the_cpu(options):
    assert_same(
        measured(GPU, **options).records(), measured(torch.device("cpu"), **options).records()
    )


@pytest.mark.slow
@pytest.mark.parametrize("build", [albert, t5])
def test_of_other_families_too(build):
    def run(device):
        torch.manual_seed(0)
        model, batch = build().double().eval().to(device), on_device(token_batch(16, 12), device)
        if build is t5:
            batch["decoder_input_ids"] = batch["input_ids"]
        with observe(model, metrics=moments) as geometry, torch.no_grad():
            model(**batch)
        return geometry.records()

    assert_same(run(GPU), run(torch.device("cpu")))


@pytest.mark.slow
def test_what_is_given_may_be_on_the_cpu():
    expected = measured(GPU, rows="words").records()
    assert_same(measured(GPU, rows="words", given_on="cpu").records(), expected)
    torch.manual_seed(0)
    model, batch = gpt_neox().eval().to(GPU), token_batch(16, 12, padding="left")
    given = {"token_ids": batch["input_ids"], "mask": batch["attention_mask"]}

    def records(**given):
        with observe(model, metrics=moments, **given) as geometry, torch.no_grad():
            model(**on_device(batch, GPU))
        return geometry.records()

    assert_same(records(**given), records())


@pytest.mark.slow
def test_tables_samples_and_files(tmp_path):
    geometry, expected = measured(GPU), measured(torch.device("cpu"))
    table, wanted = geometry.token_tables(), expected.token_tables()
    assert table.token_id.equals(wanted.token_id)
    assert table.V.to_numpy() == pytest.approx(wanted.V.to_numpy(), rel=1e-7, abs=1e-12)
    sample = geometry.samples()["block.01"]
    assert sample.rows.device.type == sample.eigenvalues.device.type == "cpu"
    torch.testing.assert_close(
        sample.eigenvalues, expected.samples()["block.01"].eigenvalues, rtol=1e-7, atol=1e-9
    )
    geometry.save(tmp_path / "folder", model="tiny", save_samples=True, token_tables=True)
    assert (tmp_path / "folder" / "samples" / "tiny.safetensors").exists()


@pytest.mark.slow
def test_layers_on_different_devices():
    torch.manual_seed(0)
    model = gpt_neox().double().eval()
    batch = token_batch(16, 12)
    with observe(model) as expected, torch.no_grad():
        model(**batch)
    last, norm = model.gpt_neox.layers[-1].to(GPU), model.gpt_neox.final_layer_norm.to(GPU)

    def to_gpu(module, args, kwargs):
        move = lambda value: value.to(GPU) if isinstance(value, torch.Tensor) else value  # noqa: E731
        return tuple(map(move, args)), {
            key: tuple(map(move, value)) if isinstance(value, tuple) else move(value)
            for key, value in kwargs.items()
        }

    last.register_forward_pre_hook(to_gpu, with_kwargs=True)
    norm.register_forward_hook(lambda module, args, output: output.cpu())
    with observe(model) as geometry, torch.no_grad():
        model(**batch)
    assert_same(geometry.records(), expected.records())


@needs_gpu
def test_a_reset_gives_the_memory_back():
    model, batch = (
        gpt_neox(hidden_size=128, intermediate_size=256).to(GPU),
        on_device(token_batch(64, 32), GPU),
    )

    def measure():
        with observe(model) as geometry, torch.no_grad():
            model(**batch)
        geometry.compute()
        geometry.reset()
        return geometry

    kept = [measure()]
    held = torch.cuda.memory_allocated()
    kept += [measure() for _ in range(3)]
    assert torch.cuda.memory_allocated() - held < 1 << 18, kept


@needs_gpu
def test_a_measured_step_draws_no_random_number_of_the_gpu():
    torch.manual_seed(0)
    model, batch = gpt_neox().to(GPU), on_device(token_batch(), GPU)
    monitor = StepMonitor(model, 1, probe=[batch], on_error="raise")
    before = torch.cuda.get_rng_state(GPU)
    with monitor.step(0, batch):
        pass
    assert torch.cuda.get_rng_state(GPU).equal(before)
    assert monitor.history


@pytest.mark.slow
def test_describe_measures_its_batch_on_the_gpu():
    model, batch = gpt_neox().to(GPU), token_batch()
    assert "No warnings" in str(GeometryMonitor(10).describe(model, on_device(batch, GPU)))
