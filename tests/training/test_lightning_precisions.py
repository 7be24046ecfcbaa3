"""The monitor under each of Lightning's precisions."""

import pytest
import torch
from torchmetrics import Metric

from embedgeo import GeometryMonitor, default_metrics
from tests.training.runs import WithoutDropout, by_step, fit, loader

DTYPES = {"bf16-mixed": torch.float32, "bf16-true": torch.bfloat16, "64-true": torch.float64}


class RowsSeen(Metric):
    """Keeps the rows it is updated with, also after a reset."""

    full_state_update = False

    def __init__(self, kept):
        super().__init__()
        self.kept = kept
        self.add_state("unused", torch.tensor(0))

    def update(self, embeddings, token_ids=None, mask=None):
        if len(embeddings):
            self.kept.append((embeddings.clone(), token_ids.clone()))

    def compute(self):
        return {"shown": torch.tensor(0.0)}


def measured(folder, precision):
    """Values by layer and metric, and the rows and token ids they were computed from, by layer."""
    shown = []

    def metrics(dim):
        shown.append([])
        return [*default_metrics(dim), RowsSeen(shown[-1])]

    monitor = GeometryMonitor(100, metrics=metrics, window=2, measure_last=False, on_error="raise")
    options = {"precision": precision, "max_steps": 2, "data": loader(32, 16)}
    fit(folder, monitor, module=WithoutDropout(), **options)
    (values,) = by_step(monitor.history).values()
    return values, dict(zip(values, (rows for rows in shown if rows), strict=True))


@pytest.mark.parametrize("precision", DTYPES)
def test_values_are_exact_for_the_rows_seen(tmp_path, precision):
    values, rows = measured(tmp_path, precision)
    assert rows["block.02"][0][0].dtype == DTYPES[precision]
    for layer, at_layer in values.items():
        expected = {}
        for metric in default_metrics(16):
            for hidden, token_ids in rows[layer]:
                metric.update(hidden, token_ids=token_ids)
            expected |= {key: float(value) for key, value in metric.compute().items()}
        found = {key: at_layer[key] for key in expected}
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True), layer
