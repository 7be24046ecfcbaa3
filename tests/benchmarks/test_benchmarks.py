"""Each benchmark runs, on tiny sizes, and its JSON has the fields that the documentation lists."""

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import (
    communication,
    compare,
    estimators,
    long_runs,
    peers,
    scaling,
    steps,
    sweep,
    timing,
    workers,
)
from benchmarks.timing import Line, Slope, report, spread, take_turns
from benchmarks.workers import ROOT, Worker
from tests.sweep.tiny import SIZES, local_run

TINY = steps.Shape("tiny", 1, 16, (2, 8), heads=2, vocabulary=32)
LINE = Line(
    "name",
    {"embedgeo": [1.0, 2.0, 2.0], "slow": [9.0, 9.0, 9.0], "fast": [2.0, 4.0, 6.0]},
    at_least=2,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    """No pauses, one run a turn, small rates."""
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(workers, "SHORTEST", 1e-9)
    monkeypatch.setattr(estimators, "floors", lambda n, d, products: {"one read of the rows": 1e-3})


def documented(kind: str) -> set[str]:
    """The fields of a kind of record, in the table of the page."""
    (row,) = re.findall(
        rf"^\| `{kind}` \|.*$", Path(ROOT, "docs/benchmarks.md").read_text(), re.MULTILINE
    )
    return {"kind", *re.findall(r"`(\w+)`", row)[1:]}


def holds(record: timing.Record) -> None:
    """A record says something, and its JSON has the fields that are documented."""
    fields = json.loads(json.dumps(record.as_dict(), allow_nan=False))
    assert set(fields) == documented(fields["kind"])
    assert str(record)


def test_sides_take_turns_and_the_first_round_does_not_count():
    ran: list[str] = []
    seconds = take_turns(
        {name: lambda name=name: ran.append(name) or float(len(ran)) for name in "ab"}, rounds=2
    )
    assert ran == ["b", "a", "a", "b", "b", "a"]
    assert seconds == {"a": [3, 6], "b": [4, 5]}


def test_a_line_compares_with_the_fastest_peer_round_by_round():
    assert LINE.over == "fast"
    assert LINE.ratios == [2, 2, 3]
    assert LINE.as_dict()["holds"]
    assert not Line(LINE.name, LINE.seconds, at_least=2.5).as_dict()["holds"]
    assert not Line(LINE.name, LINE.seconds, "slow", at_most=4).as_dict()["holds"]
    assert "at least 2" in str(LINE)
    assert spread([1, 2, 3]) == {"median": 2, "low": 1.5, "high": 2.5, "min": 1, "max": 3, "n": 3}


def test_a_slope_is_that_of_the_logarithms():
    slope = Slope("squares", [1, 10, 100], [3, 300, 30_000])
    assert slope.exponent == pytest.approx(2)
    holds(slope)


def test_runs_hold_where_their_median_and_each_of_them_do():
    assert steps.Runs("name", [1.0, 1.05, 1.1], 1.06, 1.12).as_dict()["holds"]
    assert not steps.Runs("name", [1.0, 1.05, 1.13], 1.06, 1.12).as_dict()["holds"]
    assert not steps.Runs("name", [1.0, 1.07, 1.1], 1.06, 1.12).as_dict()["holds"]


def test_records_are_printed_and_written(tmp_path, capsys):
    report([LINE, Slope("rows", [1, 2], [1, 2])], tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert [record["name"] for record in found["records"]] == ["name", "rows"]
    assert {"torch", "processors", "threads"} <= set(found["machine"])
    assert "fast ÷ embedgeo: 2 (2 to 2.5)" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_timed(tmp_path, capsys):
    parser = timing.arguments_parser("")
    assert (
        parser.parse_args(["--json", str(tmp_path / "found.json")]).json == tmp_path / "found.json"
    )
    with pytest.raises(SystemExit):
        parser.parse_args(["--json", str(tmp_path / "nowhere" / "found.json")])
    assert "must be a file in a folder that exists; got" in capsys.readouterr().err


@pytest.mark.parametrize("kind", estimators.ROWS)
def test_twonn(kind, monkeypatch):
    monkeypatch.setattr(peers, "DADAPY", Path("none"))
    line = estimators.twonn(64, 8, kind, 1, at_least=2)
    assert set(line.seconds) == {"embedgeo", "scikit-dimension", "cdist + topk"}
    holds(line)


def test_the_peers_find_the_same_dimension():
    x = estimators.gaussian(256, 8)
    ours = estimators.twonn_dimension(x).dimension
    assert peers.scikit_dimension(x) == pytest.approx(ours, rel=1e-5)
    assert float(peers.cdist_topk(x)) == pytest.approx(ours, rel=1e-2)
    assert float(peers.svd_anisotropy(x)) == pytest.approx(
        float(estimators.anisotropy(x)), rel=1e-4
    )


def test_other_estimators():
    for line in (
        estimators.anisotropies(64, 8, 1),
        estimators.token_tables(64, 8, 1),
        estimators.updates((2, 8), 8, 2, 1),
        *estimators.engines([(64, 8)], 1),
    ):
        holds(line)


def test_the_measured_steps_of_a_loop_are_measured_and_the_others_are_not():
    loop = steps.Loop(TINY, options={})
    for run in (loop.other, loop.plain, loop.measured, loop.other, loop.plain, loop.measured):
        run()
    assert {record["step"] for record in loop.monitor.history} == {2, 4}


def test_a_measured_step():
    line, runs = steps.eager_runs(TINY, 1.06, 1.12, runs=1, rounds=1)
    assert (line.over, line.under) == ("measured", "plain")
    holds(line)
    holds(runs)


def test_a_measured_step_that_is_compiled():
    for line in steps.compiled(TINY, 1.1, rounds=1, backend="eager"):
        holds(line)
    found = steps.graphs(TINY, steps=2, backend="eager")
    assert found.without["graphs"] > 0
    assert found.as_dict()["holds"]
    holds(found)


def test_scaling():
    update, compute = scaling.slopes(1, {"width": [8, 16]})
    assert (update.name, compute.name) == ("update, width", "compute, width")
    assert scaling.measurement("rows", 1024).token_ids.shape == (2, 512)


@pytest.mark.slow
def test_what_a_sweep_costs(tmp_path, monkeypatch):
    for name, value in {"NUM_TOKENS": 64, "SEQ_LEN": 16, "BATCH_SIZE": 2, "SIZE": SIZES}.items():
        monkeypatch.setattr(sweep, name, value)
    folder = local_run(tmp_path, (0,))
    for side in (sweep.without_logits, sweep.swept):
        assert min(side(folder, [0])["seconds"][0]) > 0
    assert sweep.state_bytes(folder, [0])["states"] > 0


def test_a_long_run(monkeypatch):
    # drawing takes seconds
    monkeypatch.setattr("embedgeo.report.live.draw_pictures", lambda *_: ())
    first, second = long_runs.growth((1, 2), TINY)
    holds(first)
    assert second.records == 2 * first.records
    assert min(first.seconds, first.resident, first.history_file, first.event_files) > 0


def test_what_a_worker_times(monkeypatch):
    monkeypatch.setattr(compare, "extract", lambda base, folder: None)
    monkeypatch.setattr(compare, "worker", lambda tree: Worker("tests.benchmarks.sleeper"))
    monkeypatch.setattr(estimators, "cases", lambda: dict.fromkeys(("0.001", "0.002", "no number")))
    lines = [*compare.compared("base", "*", rounds=1)]
    assert [line.name for line in lines] == ["0.001", "0.002"]
    assert (lines[0].over, lines[0].under) == ("base", "embedgeo")
    assert all(
        seconds >= float(line.name) for line in lines for (seconds,) in line.seconds.values()
    )


def test_a_process_that_has_ended_fails_its_cases():
    with Worker("tests.benchmarks.nothing") as worker:
        worker.process.wait()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="case: the process has ended"):
                worker.seconds("case")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git repository")
def test_a_revision_is_extracted(tmp_path):
    compare.extract("HEAD", tmp_path)
    assert (tmp_path / "src/embedgeo/__init__.py").exists()


@pytest.mark.parametrize("base", ["no-such-revision", "--", "HEAD:docs"])
def test_what_is_no_revision_with_sources_is_refused_in_one_line(base, tmp_path):
    with pytest.raises(
        SystemExit, match=r"^BASE must be a git revision with a folder src, .*; got '.*' \(.+\)\.$"
    ):
        compare.extract(base, tmp_path)


def test_a_case_of_the_comparison_runs():
    case = estimators.cases()["update, 1 layer of 2 × 16 × 32"]()
    case()
    assert torch.is_grad_enabled()


@pytest.mark.slow
def test_a_measured_step_takes_as_few_collectives_however_many_layers():
    found = [communication.traffic(2, layers, 8, 64) for layers in (1, 12)]
    assert found[0].calls == found[1].calls <= communication.AT_MOST
    holds(found[1])
    holds(communication.extrapolated(found[1], 12, 8, 64))
