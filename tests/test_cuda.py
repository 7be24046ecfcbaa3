"""On a GPU the numbers are the CPU's; where there is none, on a pretended one."""

from contextlib import nullcontext

import pytest
import torch

from embedgeo import Drift, StepMonitor, observe
from tests.data import KINDS, assert_values, new_metric, texts
from tests.models import gpt_neox, token_batch
from tests.pretended import COMPILER, GPU, pretended


@pytest.fixture(autouse=True)
def gpu():
    """A GPU, or a pretended one."""
    if not torch.cuda.is_available() and COMPILER is None:
        pytest.skip("needs a GPU with CUDA, or g++ to pretend one")
    with nullcontext() if torch.cuda.is_available() else pretended():
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_cpu_for_mixed_devices_and_dtypes(kind):
    """Of rows that change their dtype, and ids and masks on either device; some rows are masked,
    and some are not finite.
    """
    x, ids, sequences = texts(900, 24, mean=3.0)
    x[::50] = torch.nan
    mask = torch.arange(900) % 7 != 3
    batches = [
        (slice(0, 400), torch.bfloat16, GPU, "cpu"),
        (slice(400, 700), torch.float32, "cpu", GPU),
        (slice(700, 900), torch.float64, GPU, GPU),
    ]
    on_gpu, on_cpu, late = (new_metric(kind, 24, seed=seed) for seed in (0, 0, 1))
    for part, dtype, ids_on, mask_on in batches:
        rows = x[part].to(dtype)
        given = ids[part], mask[part], sequences[part]
        on_cpu.update(rows, *given)
        on_gpu.update(rows.to(GPU), given[0].to(ids_on), given[1].to(mask_on), given[2].to(ids_on))
    assert on_gpu.device == GPU
    expected = on_cpu.compute()
    assert_values(on_gpu.compute(), expected, rtol=1e-5, atol=1e-9)
    # it follows the rows to the other device, and merges with one on another
    late.update(x[:200], ids[:200], None, sequences[:200])
    late.merge_state(on_gpu)
    assert late.device == torch.device("cpu")
    on_gpu.update(x[:200], ids[:200], None, sequences[:200])
    assert on_gpu.device == torch.device("cpu")
    states = (each.device for each in on_gpu.metric_state.values())
    assert {device.type for device in states} == {"cpu"}


def measured(device):
    """Records of `observe`, and of a monitor in training, with weights, in float64."""
    torch.manual_seed(0)
    model = gpt_neox(num_hidden_layers=2, attn_implementation="eager").double().to(device)

    def batch(seed, **padding):
        return {key: x.to(device) for key, x in token_batch(16, 12, seed=seed, **padding).items()}

    def make_nan(module, args, hidden):
        is_nan = torch.arange(12, device=hidden.device)[:, None] == 5
        return hidden.masked_fill(is_nan, torch.nan)

    last = model.gpt_neox.layers[-1].register_forward_hook(make_nan)
    with observe(model, "block.*", skip_first_positions=1) as geometry, torch.no_grad():
        model(**batch(3, padding="left"))
    records = geometry.records()
    last.remove()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = [batch(seed, padding="left") for seed in (7, 8)]
    monitor = StepMonitor(
        model, 1, layers="block.*", probe=probe, listeners=[Drift()], jackknife=2, on_error="raise"
    )
    with monitor:
        for step in range(2):
            given = batch(step)
            with monitor.step(step, given):
                model(**given, labels=given["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [*records, *monitor.history], [weight.detach().cpu() for weight in model.parameters()]


def test_observing_and_monitoring_give_the_records_of_the_cpu():
    records, weights = measured(GPU)
    expected, of_cpu = measured("cpu")
    for got, want in zip(weights, of_cpu, strict=True):
        torch.testing.assert_close(got, want)
    assert [(each["layer"], each["metric"]) for each in records] == [
        (each["layer"], each["metric"]) for each in expected
    ]
    for got, want in zip(records, expected, strict=True):
        assert got["value"] == pytest.approx(want["value"], rel=1e-5, abs=1e-9, nan_ok=True), want
        assert got["stderr"] == pytest.approx(want["stderr"], rel=1e-4, abs=1e-9, nan_ok=True), want
