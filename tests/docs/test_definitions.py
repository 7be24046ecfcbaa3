"""docs/definitions.md defines every key there is, and random rows show what it says of them."""

import math
import re
from collections import defaultdict

import numpy as np
import pytest
import torch

from docs.facts import default_table, with_facts
from embedgeo import observe
from embedgeo.drift import debiased_cka
from embedgeo.functional import twonn_dimension
from embedgeo.glossary import OWN
from embedgeo.metrics import (
    Anisotropy,
    EmbeddingMoments,
    IntrinsicDimension,
    TokenMoments,
)
from embedgeo.metrics.gaussian import GaussianRows, baseline_values
from tests.data import OTHER_METRICS, floats, gaussian, generator, token_rows, updated
from tests.docs.page import KEYS, TEXT, TWONN, keys_under
from tests.models import VOCABULARY, gpt_neox

DIM, BATCH, DRAWS, LENGTH = 64, 128, 12, 10
COUNTS = torch.tensor([1, 2, 3] * 5 + [10, 10, 12, 15, 20, 25, 30, 40, 60, 80] * 2)
IDS = torch.repeat_interleave(torch.arange(len(COUNTS)), COUNTS)
MEDIANS = {"norm_max", "top_dim_share", "max_abs"}
UNBIASED = {"V_W_unbiased", "V_B_unbiased", "V_W_over_V_unbiased"}


def drift(x, y):
    return {f"cka_to_{other}": float(debiased_cka(x, y)) for other in ("previous", "first")}


def values_by_section(x, ids):
    """Every key of metrics of rows with its value, by the sections of the page that define it."""
    dim = x.shape[1]

    def of(*metrics):
        found = {}
        for metric in metrics:
            metric.update(x, ids, sequence_ids=torch.arange(len(x)) // LENGTH)
            found |= floats(metric.compute())
        return found

    return {
        "Size|Directions|Within|Over token types": of(TokenMoments(dim)),
        "Spectrum": of(Anisotropy(dim, spectrum=True, batch_size=BATCH)),
        "Intrinsic": of(IntrinsicDimension(dim, batch_size=BATCH, num_batches=4)),
        "The same rows": drift(*x[: len(x) // 2 * 2].chunk(2)),
        "others": of(*(kind(dim) for kind in OTHER_METRICS)),
    }


def test_every_section_defines_the_keys_of_its_metrics_and_there_are_no_others():
    x, ids = token_rows(300, 6)
    sections = values_by_section(x, ids)
    others = sections.pop("others").keys() | {key for kind in OTHER_METRICS for key in kind.terms}
    without = keys_under("Without massive")
    for heading, values in sections.items():
        assert values.keys() - without == keys_under(heading), heading
    streaming = updated(EmbeddingMoments(6), x, ids).compute().keys()
    assert streaming - without == keys_under("Size|Directions") | UNBIASED
    of_models = {"loss", "tokens_seen"}
    expected = others.union(*sections.values(), of_models, without)
    assert len(KEYS) == len(set(KEYS))
    assert set(KEYS) == expected
    assert OWN.terms.keys() <= expected
    assert all(map(OWN.find, KEYS))


@pytest.mark.slow
def test_the_facts_of_every_key_stand_below_its_heading():
    page = with_facts(TEXT)
    boxes = re.findall(r"^### (.+)\n\n((?:> .*\n)+)\n", page, re.MULTILINE)
    assert [heading for heading, _ in boxes] == re.findall(r"^### (.+)$", TEXT, re.MULTILINE)
    for heading, box in boxes:
        assert all(f"> - {name}" in box for name in heading.split(", "))
        assert "roup *" in box


def test_the_table_of_what_is_measured_by_default_has_the_keys_of_observe():
    model = gpt_neox().eval()
    ids = torch.randint(2, VOCABULARY, (8, 48), generator=generator())
    with torch.no_grad(), observe(model) as geometry:
        model.get_input_embeddings().weight[5] *= 100  # massive rows
        model(ids)
    keys = geometry.compute()["embed"].keys()
    assert "V_without_massive" in keys
    *rows, last = default_table().splitlines()
    listed = re.findall(r"^\| `(\w+)`", "\n".join(rows), re.MULTILINE)
    assert sorted(listed + re.findall(r"`(\w+)`", last)) == sorted(keys)


def test_random_rows_show_their_baselines():
    drawn, random = defaultdict(list), generator(5)
    for _ in range(DRAWS):
        x = math.sqrt(3 / DIM) * torch.randn(len(IDS), DIM, generator=random, dtype=torch.float64)
        ids = IDS[torch.randperm(len(IDS), generator=random)]
        for values in values_by_section(x, ids).values():
            for key, value in values.items():
                drawn[key].append(value)
    middle = {key: (np.median if key in MEDIANS else np.mean)(drawn[key]) for key in drawn}
    measured = {key: np.array([value]) for key, value in middle.items()}
    rows = GaussianRows(frozenset(drawn), measured, np.array([float(DIM)]))
    known = {key: value for key, (value,) in baseline_values(rows).items() if not np.isnan(value)}
    assert len(known) > 30
    for key, value in known.items():
        tolerance = 0.2 if key.startswith("intrinsic_dimension") else 0.05
        error = 4 * np.std(drawn[key]) / math.sqrt(DRAWS) + tolerance * abs(value) + 1 / len(IDS)
        assert middle[key] == pytest.approx(value, abs=error), key


@pytest.mark.parametrize(("n", "dim"), TWONN)
def test_twonn_of_random_rows_is_that_of_the_table(n, dim):
    repeats = max(1, 2048 // n)
    drawn = [
        twonn_dimension(gaussian(n, dim, seed=seed, dtype=torch.float32)).dimension
        for seed in range(repeats)
    ]
    error = 4 * 1.2 / math.sqrt(n * repeats)
    assert sum(drawn) / repeats == pytest.approx(TWONN[n, dim], rel=error + 0.02)
