"""The monitor under each of Lightning's precisions."""

import pytest
import torch
from torchmetrics import Metric

from embedgeo import GeometryMonitor, default_metrics
from tests.training.runs import WithoutDropout, by_step, fit, loader

WITHIN = {"64-true": 1e-6, "bf16-mixed": 0.01, "bf16-true": 0.01}
"""How far, relatively, from the float32 run: bfloat16 keeps 8 bits of an activation, whatever the
sums keep.
"""
DTYPES = {"bf16-true": torch.bfloat16, "64-true": torch.float64}
FARTHER = ("V_W", "intrinsic_dimension")  # what nearly equal rows decide: within 0.05 in bfloat16
COUNTS = ("duplicate_fraction", "n_points")  # rows that are equal in bfloat16 and not in float32


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


@pytest.fixture(scope="module")
def float32(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("float32"), "32-true")[0]


@pytest.mark.parametrize("precision", WITHIN)
def test_values_are_exact_for_the_rows_seen_and_near_the_float32_run(tmp_path, precision, float32):
    values, rows = measured(tmp_path, precision)
    assert rows["block.02"][0][0].dtype == DTYPES.get(precision, torch.float32)
    for layer, at_layer in values.items():
        expected = {}
        for metric in default_metrics(16):
            for hidden, token_ids in rows[layer]:
                metric.update(hidden, token_ids=token_ids)
            expected |= {key: float(value) for key, value in metric.compute().items()}
        found = {key: at_layer[key] for key in expected}
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True), layer
        for key in expected.keys() - COUNTS if layer != "final_norm" else ():
            bound = WITHIN[precision] * (5 if key.startswith(FARTHER) else 1)
            near = pytest.approx(float32[layer][key], rel=bound, nan_ok=True)
            assert at_layer[key] == near, (layer, key)
