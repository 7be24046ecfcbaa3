"""Saved samples: the same rows at every layer and checkpoint, from which the recorded numbers
follow again.
"""

import pytest
import torch

import embedgeo
from embedgeo import Anisotropy, IntrinsicDimension
from embedgeo.functional import RowLabels, labelled_dimensions, twonn_dimension
from embedgeo.functional.spectrum import full_spectrum_values
from tests.data import assert_values, updated
from tests.models import gpt_neox, token_batch
from tests.training.runs import observed_on

SIZE = 30


def metrics(dim):
    return [Anisotropy(dim, spectrum=True), IntrinsicDimension(dim, batch_size=SIZE)]


def measured(model, batches, **options):
    return observed_on(model.eval(), batches, metrics=metrics, **options)


@pytest.mark.parametrize("padding", [None, "left"])
def test_rows_are_those_of_the_hidden_states_by_number_and_the_same_at_each_step(padding):
    batches = [token_batch(8, 12, seed=i, padding=padding) for i in range(3)]
    numbers = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = gpt_neox().eval().bfloat16()
        samples = measured(model, batches, layers="hidden_states").samples()
        with torch.no_grad():
            states = [model(**batch, output_hidden_states=True).hidden_states for batch in batches]
        kept = [batch["attention_mask"].bool() for batch in batches]
        for i, sample in enumerate(samples.values()):
            hidden = torch.cat([state[i][mask] for state, mask in zip(states, kept, strict=True)])
            assert sample.rows.dtype == torch.bfloat16
            assert sample.rows.equal(hidden[sample.row_numbers])
            torch.testing.assert_close(sample.mean, hidden.double().mean(0))
            numbers.append(sample.row_numbers)
    assert len(numbers) == 8
    assert all(each.equal(numbers[0]) for each in numbers)
    assert len(numbers[0].unique()) == SIZE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_recorded_numbers_follow_from_a_saved_sample(tmp_path, dtype):
    torch.manual_seed(0)
    geometry = measured(gpt_neox().to(dtype), [token_batch(8, 12, seed=i) for i in range(8)])
    geometry.save(tmp_path, model="a", step=1, save_samples=True)
    sample = embedgeo.load_sample(tmp_path, "a--step1")
    assert (sample.model, sample.revision, sample.step) == ("a", "step1", 1)
    values = geometry.compute()
    assert list(sample.layers) == list(values)
    for layer, of_layer in sample.layers.items():
        recorded = values[layer]
        assert of_layer.n == 8 * 8 * 12
        assert of_layer.rows.dtype == dtype
        labels = RowLabels(of_layer.token_ids, of_layer.sequence_ids)
        by_label = labelled_dimensions(of_layer.rows, labels)
        spectrum = of_layer.eigenvalues
        assert spectrum.dtype == of_layer.mean.dtype == torch.float64
        assert spectrum.equal(spectrum.sort(descending=True).values)
        again = {
            "same_sequence_neighbors": by_label.same_sequence[0],
            "anisotropy": spectrum[0] / spectrum.sum(),
            **full_spectrum_values(spectrum),
        }
        for end, estimate in (
            ("", twonn_dimension(of_layer.rows)),
            ("_between", by_label.between),
            ("_within", by_label.within),
        ):
            again[f"intrinsic_dimension{end}"] = estimate.dimension
            again[f"n_points{end}"] = estimate.num_points
        assert_values(recorded, again, rtol=1e-9)
        metric = updated(IntrinsicDimension(of_layer.rows.shape[1], batch_size=SIZE), of_layer.rows)
        assert float(metric.compute()["duplicate_fraction"]) == recorded["duplicate_fraction"]
    assert not torch.isnan(torch.tensor(values["block.02"]["intrinsic_dimension"]))
