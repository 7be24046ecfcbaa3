"""What the metrics of a layer, and the layers of a forward pass, share: it is made once, and the values stay."""

import gc
import weakref
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import embedgeo
from embedgeo import Anisotropy, EmbeddingMoments, TokenMoments, observe
from embedgeo.functional import rows
from embedgeo.functional.moments import CHUNK_ELEMENTS, row_moments
from embedgeo.functional.rows import Batch, RowIds, Rows, select_rows
from embedgeo.functional.sampling import Sample
from embedgeo.metrics.layer import LayerMetrics
from tests.data import floats, gaussian, texts
from tests.models import gpt_neox, token_batch


def counted(monkeypatch, module, name):
    """Counts the calls of a function or class of a module."""
    calls, called = Counter(), getattr(module, name)

    def count(*args, **kwargs):
        calls[name] += 1
        return called(*args, **kwargs)

    monkeypatch.setattr(module, name, count)
    return calls


def observed(batches, before=lambda: None, **options):
    """A model's geometry, and what ``before`` has returned once there are hooks and no forward pass yet."""
    model = gpt_neox().eval()
    with observe(model, **options) as geometry, torch.no_grad():
        found = before()
        for batch in batches:
            model(**batch)
    return geometry, found


@pytest.mark.parametrize("padding", [None, "right"])
def test_rows_are_looked_through_once_a_layer(monkeypatch, padding):
    geometry, checks = observed(
        [token_batch(seed=i, padding=padding) for i in range(2)], lambda: counted(monkeypatch, rows, "_finite")
    )
    assert checks == {"_finite": 2 * len(geometry.layers)}


def test_words_are_found_once_a_forward_pass(monkeypatch):
    found = counted(monkeypatch, embedgeo.geometry, "find_words")
    observed([token_batch(4)], rows="words", word_ids=torch.arange(12).expand(4, 12) // 3)
    assert found == {"find_words": 1}


def test_nothing_of_the_ids_is_kept_after_the_measurement(monkeypatch):
    made, init = [], RowIds.__init__

    def remember(self, *args, **kwargs):
        made.append(weakref.ref(self))
        init(self, *args, **kwargs)

    monkeypatch.setattr(RowIds, "__init__", remember)
    geometry, _ = observed([token_batch(4)], jackknife=2)
    gc.collect()
    assert made
    assert all(each() is None for each in made)
    assert geometry.compute()["block.01"]["n"] == 48


def test_ids_that_change_in_place_between_two_calls_of_the_blocks_count_as_they_are():
    model, ids = gpt_neox().eval(), torch.arange(8).view(2, 4)
    block = model.gpt_neox.layers[0]
    hidden = gaussian(2, 4 * 16).view(2, 4, 16).float()
    positions = model.gpt_neox.rotary_emb(hidden, torch.arange(4)[None])
    with observe(model, "block.00", token_ids=ids, mask=torch.ones(2, 4)) as geometry, torch.no_grad():
        block(hidden, position_embeddings=positions)
        ids += 100
        block(hidden, position_embeddings=positions)
    table = geometry.token_tables()
    assert sorted(table["token_id"]) == [*range(8), *range(100, 108)]


@pytest.mark.parametrize("make", [TokenMoments, EmbeddingMoments, Anisotropy])
def test_prepared_rows_give_the_values_of_tensors(make):
    x, ids, sequences = texts(300, 6)
    x[7] = torch.nan
    mask = torch.arange(300) % 5 > 0
    of_tensors, of_rows = make(6), make(6)
    of_tensors.update(x, ids, mask, sequences)
    of_rows.update(select_rows(x, ids, mask, sequences, dim=6))
    assert floats(of_rows.compute()) == pytest.approx(floats(of_tensors.compute()), rel=0, abs=0, nan_ok=True)
    assert of_rows.num_nonfinite == 1


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_row_alone_that_lies_apart_in_memory_is_a_row(is_kept):
    x = torch.tensor([1.0, 0.0, 2.0, 0.0, 3.0, 0.0])[::2]
    rows = select_rows(x, torch.tensor(7), torch.tensor(is_kept), dim=3)
    assert rows.embeddings.tolist() == [[1.0, 2.0, 3.0]] * is_kept
    assert rows.token_ids.tolist() == [7] * is_kept


def test_prepared_rows_of_another_width_or_with_ids_beside_them_are_refused():
    prepared = Rows.of(gaussian(4, 6), RowIds.of(Batch(None, None)))
    with pytest.raises(ValueError, match=r"must have shape \(\.\.\., 5\); got \(4, 6\)"):
        TokenMoments(5).update(prepared)
    with pytest.raises(ValueError, match="Pass the rows alone"):
        TokenMoments(6).update(prepared, torch.arange(4))


def test_a_metric_that_overrides_update_gets_tensors():
    class Own(TokenMoments):
        def update(self, embeddings, token_ids=None, mask=None, sequence_ids=None):
            super().update(2 * embeddings, token_ids, mask, sequence_ids)

    x = gaussian(24, 4).view(2, 12, 4)
    metrics = LayerMetrics(lambda dim: [Own(dim)], 4, device=torch.device("cpu"))
    metrics.update(x, torch.arange(24).view(2, 12) % 5, torch.arange(24).view(2, 12) > 3, None)
    values, _ = metrics.compute()
    assert float(values["norm_max"][0]) == pytest.approx(2 * x.view(24, 4)[4:].norm(dim=1).max().item())


class Watched(TorchDispatchMode):
    """What a device would have to wait for, and the largest tensor that is made."""

    WAITS = ("_local_scalar_dense", "nonzero", "unique", "equal.", "bincount", "masked_select")

    def __init__(self):
        super().__init__()
        self.waits, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.waits += [str(func)] if any(name in str(func) for name in self.WAITS) else []
        self.largest = max(self.largest, result.numel() if isinstance(result, torch.Tensor) else 0)
        return result


def test_a_device_waits_nine_times_for_the_first_batch_of_a_layer():
    x, ids, sequences = texts(512, 64)
    x, prepared = x.float().view(8, 64, 64), rows.row_ids(gaussian(512, 1), ids, None, sequences)
    first, second = (LayerMetrics(embedgeo.default_metrics, 64, device=torch.device("cpu")) for _ in range(2))
    first.update(x.view(512, 64), ids=prepared)
    with Watched() as watched:
        second.update(x.view(512, 64), ids=prepared)
    assert len(watched.waits) == 9


def test_the_moments_of_wide_rows_hold_little_more_than_a_chunk_of_them():
    x = torch.zeros(400, 2**15, dtype=torch.bfloat16)
    with Watched() as watched:
        row_moments(x)
    assert watched.largest <= 2 * CHUNK_ELEMENTS


def test_only_the_rows_that_are_drawn_are_copied():
    x = gaussian(5000, 8).float()
    sample = Sample.empty(8, 100)
    for part in (x[:3000], x[3000:]):
        with Watched() as watched:
            sample = sample.extend(part, seed=0)
        assert watched.largest <= len(part) + 100 < 8 * len(part)
    assert len(sample.rows) == 100
