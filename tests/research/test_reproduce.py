"""Verdicts on claims of papers, on planted values; a page of a tiny model."""

import json
import re
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

from research import reproduce
from research.claims import Claim, read_claims
from research.measured import Measured
from research.occurrences import TokenOccurrences, chosen_types, write_occurrences
from research.verdicts import Series, falling, near, peak, phase, settles, trend
from tests.sweep.tiny import checkpoint_files, write_files

NAN = float("nan")
FLAT = [5.0] * 7
BELL = list(np.sin(np.linspace(0, np.pi, 13)) + 1)
FALLEN = [float(5 + x) for x in np.cos(np.linspace(0, 3 * np.pi, 13))]
in_the_middle = partial(peak, in_the_middle=True)
in_phase = {which: partial(phase, which=which) for which in (1, 2, 3)}
settled = partial(settles, steps=[0, 10, 40, 60, 100])


@pytest.mark.parametrize(
    ("rule", "values", "error", "verdict"),
    [
        (peak, FLAT, 0.01, "does not hold"),
        (peak, FLAT, NAN, "not comparable"),
        (in_the_middle, BELL, 0.01, "holds"),
        (in_the_middle, [1.0, 3.0, *[1.5] * 10, 1.0], 0.01, "does not hold"),
        (partial(falling, in_the_middle), [3 - x for x in BELL], 0.01, "holds"),
        *((rule, FALLEN, 0.01, "holds") for rule in in_phase.values()),
        *((in_phase[i], [10 - x for x in FALLEN], 0.01, "does not hold") for i in (1, 3)),
        (partial(falling, trend), [1, 2, 3, 4], 0.01, "does not hold"),
        (trend, [1.0, 2.0] * 7, 0.6, "not comparable"),
        (trend, [1 + 1e-4 * i for i in range(9)], 1e-6, "does not hold"),  # too small to see
        (settled, [1.0, 1.2, 1.8, 2.2, 3.0], 0.01, "does not hold"),  # grows to the end
    ],
)
def test_planted_shapes_hold_where_they_are_right_and_do_not_where_they_are_wrong(
    rule, values, error, verdict
):
    names = [f"at {i}" for i in range(len(values))]
    found = rule(Series(names, np.array(values, dtype=float), error * np.eye(len(values))))
    assert found.verdict == verdict


@pytest.mark.parametrize(
    ("measured", "error", "verdict"),
    [
        (-0.249, 0.0, "holds"),
        (-0.251, 0.0, "does not hold"),
        (-0.251, 0.01, "holds"),
        (-0.2, 0.1, "not comparable"),
        (-0.2, NAN, "not comparable"),
    ],
)
def test_a_printed_value_holds_within_two_errors_and_its_rounding(measured, error, verdict):
    claim = Claim(at="", claim="", rule="value", metric="Q", printed="-0.2")
    assert near(measured, error, claim.number, claim.tolerance, 1e9).verdict == verdict


def planted(values, steps=(0,), **given):
    """What was measured of a model without a model, at the layers ``hidden.00``, ``hidden.01`` …"""
    records = []
    for metric, of_metric in values.items():
        for step, at_layers in zip(steps, np.reshape(of_metric, (len(steps), -1)), strict=True):
            for i, value in enumerate(at_layers):
                place = {"step": step, "layer": f"hidden.{i:02d}", "layer_index": i, "width": 8}
                records.append({**place, "metric": metric, "value": value, "stderr": 1e-6})
    model = {"model": "m", "label": "m", "group": given.pop("group", "")}
    given.setdefault("asked", {"num_tokens": 10**9})
    return Measured(**model, records=pd.DataFrame(records), has_steps=len(steps) > 1, **given)


def verdict(measured, *others, **claim):
    found = Claim(**{"at": "", "claim": "", "metric": "Q", **claim})
    return reproduce.judge(found, measured, [measured, *others]).verdict


RISES, FALLS = [0.1, 0.3, 0.5, 0.6, 0.7, 0.8], [0.8, 0.7, 0.6, 0.5, 0.3, 0.1]
OVER_STEPS = np.repeat([[1.0], [2.0], [2.8], [3.0], [3.0]], 3, axis=1)
FACTS = {"num_parameters": "109514298", "model_class": "BertForMaskedLM"}


@pytest.mark.parametrize(
    ("claim", "right", "wrong", "steps"),
    [
        ({"rule": "value", "layer": "max", "printed": "0.8"}, RISES, [1.0, 2.0], (0,)),
        ({"rule": "above", "layer": "deeper", "limit": 0.5}, RISES, FALLS, (0,)),
        ({"rule": "below", "layer": "middle"}, [1, 1, -1, 1], [-1, -1, 1, -1], (0,)),
        ({"rule": "settles", "direction": "up"}, OVER_STEPS, 5 - OVER_STEPS, (0, 10, 40, 60, 100)),
        ({"rule": "fact", "metric": "layers", "printed": "6"}, RISES, [1, 2], (0,)),
        ({"rule": "fact", "metric": "width", "printed": "8"}, RISES, None, (0,)),
        ({"rule": "fact", "metric": "parameters", "printed": "110e6"}, RISES, None, (0,)),
        ({"rule": "fact", "metric": "architecture", "printed": "post-ln"}, RISES, None, (0,)),
    ],
)
def test_a_claim_holds_where_it_is_planted_and_not_where_its_opposite_is(
    claim, right, wrong, steps
):
    assert verdict(planted({"Q": right}, steps, facts=FACTS), **claim) == "holds"
    if wrong is not None:
        assert verdict(planted({"Q": wrong}, steps, facts=FACTS), **claim) == "does not hold"


def test_a_verdict_that_massive_rows_make_neither_holds_nor_fails():
    bell, flat = [0.1, 0.5, 0.9, 0.5, 0.1], [0.1] * 5
    claim = {"metric": "Q", "rule": "above", "layer": "max", "limit": 0.5}
    values = {"Q": bell, "n_massive": [0.0, 50.0, 50.0, 50.0, 0.0]}
    assert verdict(planted(values), **claim) == "holds"
    assert verdict(planted(values | {"Q_without_massive": bell}), **claim) == "holds"
    made = planted(values | {"Q_without_massive": flat})
    assert verdict(made, **claim) == "made by a few rows"


@pytest.mark.parametrize("slope", [-0.5, 0.5])
def test_a_slope_over_types_is_that_of_a_least_squares_line(tmp_path, slope):
    random = np.random.default_rng(0)
    parts = []
    for i in range(3):
        m = random.uniform(1, 2, 400)
        v = 10 + slope * m + 0.01 * random.standard_normal(400)
        n = (10 ** random.uniform(1, 4, 400)).round()
        columns = {"token_id": range(400), "token": "t", "n": n, "Q": m + v, "M": m, "V": v}
        parts.append(pd.DataFrame({"layer": f"hidden.{i:02d}", **columns}))
    types = pd.concat(parts)
    types.to_parquet(tmp_path / "main.parquet")
    values = {"token_types_regressed": [400] * 3}
    measured = planted(values, tables={"tokens": {0: tmp_path / "main.parquet"}})
    of_types = measured.over_types
    expected = [np.polyfit(part["M"], part["V"], 1)[0] for part in parts]
    np.testing.assert_allclose(of_types["V_on_M_slope"].values, expected, rtol=1e-9)
    raw = np.polyfit(np.log10(parts[0]["n"]), parts[0]["Q"], 1)[0] / parts[0]["Q"].mean()
    assert of_types["Q_raw_slope"].values[0] == pytest.approx(raw)
    found = verdict(measured, rule="below", metric="V_on_M_slope", layer="middle")
    assert found == ("holds" if slope < 0 else "does not hold")


def test_occurrences_are_of_the_chosen_types_in_the_plane_of_their_own_axes():
    x, ids = torch.randn(300, 6, dtype=torch.float64) + 3, torch.arange(300) % 50
    metric = TokenOccurrences(6, [7, 3], most=4)
    for part in (slice(0, 100), slice(100, 300)):
        metric.update(x[part], ids[part])
    assert metric.plane()["token_id"].tolist() == [3] * 4 + [7] * 4
    every = TokenOccurrences(6, [3])
    every.update(x, ids)
    plane = every.plane()
    axes = np.linalg.svd((x[ids == 3] - x[ids == 3].mean(0)).numpy())[2][:2]
    expected = np.sort(np.abs(x[ids == 3].numpy() @ axes.T), axis=0)
    found = np.sort(torch.stack((plane["pc1"], plane["pc2"]), 1).abs().numpy(), axis=0)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    types = pd.DataFrame(
        {"token_id": range(40), "token": "word", "n": [9] * 5 + [10] * 30 + [99] * 5}
    )
    assert len(chosen_types(types)) == 4 + 2  # 2 + √4 of the largest bin, 2 + ⌊√(4/6)⌋ of the other


@pytest.mark.slow
def test_every_claim_of_the_page_of_a_tiny_model_has_a_verdict(tmp_path):
    write_files(tmp_path / "bert", checkpoint_files(0, "bert"))
    (tmp_path / "text.txt").write_text("the quick brown fox\na lazy dog sleeps\n" * 40)
    given = ["--model", str(tmp_path / "bert"), "--text", str(tmp_path / "text.txt")]
    given += ["--sample", "1", "--seq-len", "32", "--out", str(tmp_path / "out")]
    assert reproduce.main(["yamagiwa2025", *given]) == 0
    folder = tmp_path / "out" / "reproduce"
    rows = pd.read_csv(folder / "yamagiwa2025.csv", keep_default_na=False)
    claims = read_claims("yamagiwa2025").claims
    assert {*zip(rows["at"], rows["claim"], strict=True)} == {(x.at, x.claim) for x in claims}
    assert (rows["why"] != "").all()
    page = (folder / "yamagiwa2025.html").read_text()
    assert page.count('<td class="verdict"><strong>') == len(rows)
    shown, _, folded = page.partition("<details>")
    folded = folded.partition("</details>")[0]
    assert "another model: " not in shown
    assert folded.count("another model: ") > 10
    pictures = re.findall(r'<img src="([^"]+)"', page)
    names = ("histograms", "V-against-M")
    assert {f"yamagiwa2025/token-types/tokens-{name}.png" for name in names} <= {*pictures}
    assert all((folder / path).is_file() for path in pictures)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["asked"]["count_range"] == [10, 100_000]
    write_occurrences(tmp_path / "out")
    (table,) = (tmp_path / "out" / "occurrences").glob("*.parquet")
    assert {"layer", "token_id", "pc1", "pc2"} <= {*pd.read_parquet(table)}
