"""Each benchmark runs on tiny sizes, prints what it found, and its JSON has the fields that the
documentation lists.
"""

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import (
    communication,
    estimators,
    gpu,
    long_runs,
    many_runs,
    peers,
    scaling,
    steps,
    sweep,
    timing,
    workers,
)
from benchmarks.timing import Line, Slope, report, take_turns
from benchmarks.workers import ROOT
from tests.sweep.tiny import SIZES, local_run

TINY = steps.Shape("tiny", 1, 16, (2, 8), heads=2, vocabulary=32)
LINE = Line(
    "name",
    {"embedgeo": [1.0, 2.0, 2.0], "slow": [9.0, 9.0, 9.0], "fast": [2.0, 4.0, 6.0]},
    at_least=2,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No pauses, one run a turn, small rates, no pictures."""
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(workers, "SHORTEST", 1e-9)
    monkeypatch.setattr(estimators, "floors", lambda n, d, products: {"one read of the rows": 1e-3})
    monkeypatch.setattr("embedgeo.report.live.draw_pictures", lambda *_: ())
    monkeypatch.setattr(peers, "DADAPY", Path("none"))


QUICK = {
    "twonn": lambda: [estimators.twonn(64, 8, kind, 1, at_least=2) for kind in estimators.ROWS],
    "anisotropies": lambda: [estimators.anisotropies(64, 8, 1)],
    "token tables": lambda: [estimators.token_tables(64, 8, 1)],
    "updates": lambda: [estimators.updates((2, 8), 8, 2, 1)],
    "engines": lambda: estimators.engines([(64, 8)], 1),
    "steps": lambda: steps.eager_runs(TINY, 1.06, 1.12, runs=1, rounds=1),
    "scaling": lambda: scaling.slopes(1, {"width": [8, 16]}),
    "long runs": lambda: long_runs.growth((1, 2), TINY),
}
SLOW = {
    "many runs": lambda: many_runs.costs("HEAD", 2, 2),
    "compiled": lambda: [
        steps.graphs(TINY, steps=2, backend="eager"),
    ],
    "communication": lambda: [
        found := communication.traffic(2, 1, 8, 64),
        communication.extrapolated(found, 12, 8, 64),
    ],
}


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_what_is_found_is_printed_and_has_the_documented_fields(name, tmp_path, capsys):
    records = [*(QUICK | SLOW)[name]()]
    report(records, tmp_path / "found.json")
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"torch", "processors", "threads"} <= set(found["machine"])
    page = Path(ROOT, "benchmarks/README.md").read_text()
    for record, fields in zip(records, found["records"], strict=True):
        (row,) = re.findall(rf"^\| `{fields['kind']}` \|.*$", page, re.MULTILINE)
        assert set(fields) == {"kind", *re.findall(r"`(\w+)`", row)[1:]}
        assert str(record) in printed


def test_sides_take_turns_and_the_first_round_does_not_count():
    ran = []
    sides = {name: lambda name=name: ran.append(name) or float(len(ran)) for name in "ab"}
    assert take_turns(sides, rounds=2) == {"a": [3, 6], "b": [4, 5]}
    assert ran == ["b", "a", "a", "b", "b", "a"]


def test_a_line_compares_with_the_fastest_peer_round_by_round(printed):
    assert (LINE.over, LINE.ratios) == ("fast", [2, 2, 3])
    assert LINE.as_dict()["holds"]
    assert not Line(LINE.name, LINE.seconds, at_least=2.5).as_dict()["holds"]
    assert not Line(LINE.name, LINE.seconds, "slow", at_most=4).as_dict()["holds"]
    assert "fast ÷ embedgeo: 2 (2 to 2.5)" in str(LINE)
    assert Slope("squares", [1, 10, 100], [3, 300, 30_000]).exponent == pytest.approx(2)
    for ratios, holds in (([1.0, 1.05, 1.1], True), ([1, 1, 1.13], False), ([1.07, 1.1], False)):
        assert steps.Runs("name", ratios, 1.06, 1.12).as_dict()["holds"] == holds


def test_the_peers_find_the_same_dimension():
    x = estimators.gaussian(256, 8)
    ours = estimators.twonn_dimension(x).dimension
    assert peers.scikit_dimension(x) == pytest.approx(ours, rel=1e-5)
    assert float(peers.cdist_topk(x)) == pytest.approx(ours, rel=1e-2)
    anisotropy = float(estimators.anisotropy(x))
    assert float(peers.svd_anisotropy(x)) == pytest.approx(anisotropy, rel=1e-4)


@pytest.mark.slow
def test_what_a_sweep_costs(tmp_path, monkeypatch):
    for name, value in {"NUM_TOKENS": 64, "SEQ_LEN": 16, "BATCH_SIZE": 2, "SIZE": SIZES}.items():
        monkeypatch.setattr(sweep, name, value)
    folder = local_run(tmp_path, (0,))
    for side in (sweep.without_logits, sweep.swept):
        assert min(side(folder, [0])["seconds"][0]) > 0
    assert sweep.state_bytes(folder, [0])["states"] > 0


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32:UserWarning")
def test_the_benchmark_of_a_gpu_runs_also_on_the_cpu(tmp_path):
    file = tmp_path / "gpu.json"
    parts = ["tf32", "twonn", "measurement", "ranks", "steps tiny eager"]
    gpu.main(["--tiny", "--json", str(file), "--only", *parts])
    results = json.loads(file.read_text())
    assert not results["errors"]
    assert results["device"]["is_gpu"] is torch.cuda.is_available()
    assert {name.split()[0] for name in results} <= {*re.findall(r"``(\w+)", gpu.__doc__)}
