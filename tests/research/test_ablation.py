"""Ablations and the logit lens, against computations by hand."""

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from research import ablation
from research.ablation import Ablation, Text
from tests import models
from tests.sweep.tiny import local_run


def by_hand(rows, ids, other, other_ids, name):
    """The rows of one half, replaced by what follows from the other half, row by row."""
    mean = other.mean(0)
    if name == "without_offset":
        return rows - mean
    changed = rows.clone()
    if name == "without_3_directions":
        for axis in torch.linalg.svd(other - mean, full_matrices=False).Vh[:3]:
            changed -= ((rows - mean) @ axis)[:, None] * axis
    if name == "without_3_coordinates":
        largest = other.var(0).argsort(descending=True)[:3]
        changed[:, largest] = mean[largest]
    for i, token in enumerate(ids.tolist()):
        if token in other_ids.tolist():
            type_mean = other[other_ids == token].mean(0)
            if name == "without_context":
                changed[i] = type_mean
            if name == "without_token":
                changed[i] = rows[i] - type_mean
    return changed


def test_changes_and_lens_are_those_of_computations_by_hand():
    model = models.gpt2().double().eval()
    ids = torch.randint(models.VOCABULARY, (6, 9), generator=torch.Generator().manual_seed(0))
    targets = torch.cat((ids[:, 1:], torch.full((6, 1), -100)), 1)
    run = Ablation(model, Text(ids, targets, 0, ids), batch_size=4, removed="3")
    found = pd.DataFrame([*run.changes(), *run.lens()])
    found = found.set_index(["layer", "metric"])["value"]
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
        last = run.hidden(run.layers[-2])

        def loss(hidden, own):
            logits = model.lm_head(model.transformer.ln_f(hidden))[:, :-1]
            return float(F.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten()))

        for start, end in ((0, ""), (1, "_after_first")):
            for name in run.replacements[:-1]:
                change = 0.0
                for half in (0, 1):
                    own, other = ids[half::2], ids[1 - half :: 2]
                    h = last[half::2].clone()
                    rows, of_other = h[:, start:], last[1 - half :: 2, start:].flatten(0, 1)
                    replaced = (rows.flatten(0, 1), own[:, start:].flatten(), of_other)
                    h[:, start:] = by_hand(*replaced, other[:, start:].flatten(), name).view_as(
                        rows
                    )
                    change += (loss(h, own) - loss(last[half::2], own)) / 2
                value = found[run.layers[-2].name, f"loss_change_{name}{end}"]
                assert value == pytest.approx(change, abs=1e-6), (name, end)
        assert found["embed", "logit_lens_loss"] == pytest.approx(loss(states[0], ids), abs=1e-6)
    assert (found.xs("loss_change_identity", level="metric") == 0).all()


@pytest.mark.slow
def test_the_checkpoints_of_a_run_have_tables_and_figures(tmp_path):
    model = str(local_run(tmp_path / "run", (0, 8), kind="bert"))
    options = ["--num-tokens", "512", "--seq-len", "32", "--removed", "1"]
    ablation.main(["--model", model, "--out", str(tmp_path / "out"), *options])
    table = pd.read_parquet(tmp_path / "out" / "step8.parquet").set_index(["layer", "metric"])
    lens = table["value"]["block.01", "logit_lens_loss"]
    assert lens == pytest.approx(table["value"]["model", "loss"], abs=1e-6)
    assert (tmp_path / "out" / "step8.png").is_file()
