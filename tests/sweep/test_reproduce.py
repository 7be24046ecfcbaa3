"""The papers beside what is measured of small models, through a local Hub: verdicts on what is
planted in them.
"""

import re
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
import yaml

from embedgeo.cli import main
from embedgeo.presets import preset
from embedgeo.results.folder import SweepFolder
from embedgeo.studies import reproduce as command
from embedgeo.studies.claims import Claim, read_claims
from embedgeo.studies.reproduce import judge
from embedgeo.studies.verdicts import Series, falling, near, peak, phase, settles, trend
from tests.sweep.papers import (
    FEWER,
    dataset_files,
    decoder_files,
    model_files,
    planted,
    planted_types,
    ranked_files,
)

pytestmark = pytest.mark.usefixtures("unpainted")

PAPERS = ("yamagiwa2025", "razzhigaev2024", "li2025")
VERDICTS = {"holds", "does not hold", "too few types", "not comparable"}


def reproduced(paper, folder, *given, **options):
    """The rows of the page of a paper, after the command."""
    asked = [
        f"--{name.replace('_', '-')}={value}" for name, value in {**FEWER[paper], **options}.items()
    ]
    assert main(["reproduce", paper, *given, "--out", str(folder), *asked]) == 0
    page = (folder / "reproduce" / f"{paper}.html").read_text()
    rows = pd.read_csv(
        folder / "reproduce" / f"{paper}.csv", keep_default_na=False, na_values=["", "nan"]
    )
    assert page.count('<td class="verdict"><strong>') == len(rows)
    assert "http" not in page.replace("https://arxiv.org", "").replace("https://github.com", "")
    return rows


@pytest.fixture
def texts(datasets_hub):
    """A Hub with the text of each paper."""
    for paper in PAPERS:
        name, files = dataset_files(preset(paper)["text"], documents=400)
        datasets_hub.add(name, "main", files)
    return datasets_hub


@pytest.mark.slow
@pytest.mark.parametrize("paper", PAPERS)
def test_every_row_of_every_page_has_a_verdict(texts, tmp_path, capsys, paper):
    asked = preset(paper)
    is_final = asked["steps"] == "final"
    steps = ["main"] if is_final else ["main", *(f"step{s}-tokens{s}B" for s in (1, 2, 4))]
    for i, model in enumerate(asked["model"]):
        for revision in steps:
            texts.add(model, revision, model_files(model, i + len(revision)))
    rows = reproduced(paper, tmp_path / "out")
    assert set(rows["verdict"]) <= VERDICTS
    assert rows["why"].notna().all()
    claims = read_claims(paper).claims
    assert {*zip(rows["at"], rows["claim"], strict=True)} == {(x.at, x.claim) for x in claims}
    folder = tmp_path / "out" / "reproduce"
    page = (folder / f"{paper}.html").read_text()
    pictures = [unquote(path) for path in re.findall(r'<img src="([^"]+)"', page)]
    assert all((folder / path).is_file() for path in pictures)
    assert (folder / paper / "index.html").is_file()
    swept = SweepFolder(tmp_path / "out")
    assert len(swept.done()) == len(asked["model"]) * (1 if is_final else 3)
    assert {swept.facts(name).get("has_step") for name in swept.done()} == {
        "false" if is_final else None
    }
    undecided = (rows["verdict"] == "not comparable").sum()
    assert f"{undecided} not comparable" in capsys.readouterr().out
    # a few thousand tokens of a small model are not 12 million of a large one
    if paper == "yamagiwa2025":
        printed = rows[rows["rule"] == "value"]
        assert set(printed["verdict"]) <= {"not comparable", "too few types"}
        over_types = rows[rows["metric"].fillna("").str.startswith("V_on_M")]
        assert set(over_types["verdict"]) == {"too few types"}
        facts = rows[rows["rule"] == "fact"]
        assert set(facts["verdict"]) == {"holds", "does not hold"}  # of the norms, of the sizes
        unchecked = rows[rows["metric"].isna()].set_index("at")["why"]
        assert unchecked["Figure 3"] == "a definition, which the metrics follow"
        assert unchecked["Figure 8"] == "a picture, for you to compare"
        drawn = {Path(path).stem for path in pictures}
        assert {"gpt2-tokens-V-against-M", "M_over_Q-compared-profiles"} <= drawn


BERT = "google-bert/bert-base-uncased"
VALUE = {
    "at": "Figure 2",
    "claim": "slope",
    "rule": "value",
    "metric": "V_on_M_slope",
    "layer": "middle",
}
TOKEN = {"at": "T", "claim": "V", "rule": "value", "metric": "V", "token": "e", "layer": "middle"}


@pytest.fixture
def claims(tmp_path):
    """Writes a file with claims of a paper."""

    def written(paper, *entries):
        path = tmp_path / "claims.yaml"
        about = {"title": "T", "authors": "A", "url": "https://arxiv.org/abs/0", "text": "some"}
        path.write_text(yaml.safe_dump({paper: {**about, "claims": [*entries]}}))
        return str(path)

    return written


@pytest.mark.slow
def test_printed_values_hold_where_they_are_right_and_do_not_where_they_are_wrong(
    texts, tmp_path, claims, monkeypatch
):
    few = {name: FEWER["yamagiwa2025"][name] for name in ("sample", "seq_len")}
    monkeypatch.setattr(command, "preset", lambda paper: preset(paper) | few)
    texts.add(BERT, "main", model_files(BERT, 1))
    count = {"at": "T", "claim": "n", "rule": "value", "metric": "occurrences"}
    few_types = {**VALUE, "least_types": 2}

    def rows(printed):
        entries = [
            {**each, "printed": value}
            for each, values in zip((few_types, TOKEN, count), printed, strict=True)
            for value in values
        ]
        given = ["--model", BERT, "--claims", claims("yamagiwa2025", *entries)]
        return reproduced("yamagiwa2025", tmp_path / "out", *given, num_tokens=10**6)

    slope, of_token, occurrences = rows([["-0.5"], ["1.0"], ["1000"]])["measured"]
    table = pd.read_parquet(tmp_path / "out" / "tokens" / "main.parquet")
    middle = table[(table["layer"] == "hidden.01") & (table["token"] == "e")]
    assert of_token == pytest.approx(middle["V"].iloc[0])
    text = yaml.safe_load((tmp_path / "out" / "manifest.json").read_text())["text"]
    assert occurrences == text["num_tokens"]  # marks count
    printed = [
        [f"{slope:.12f}", f"{slope * 1.6:.3f}"],
        [f"{of_token:.12f}", f"{of_token * 1.6:.3f}"],
        [f"{occurrences:.0f}", f"{occurrences * 1.5:.0f}"],
    ]
    both = rows(printed)
    assert both["verdict"].tolist() == ["holds", "does not hold"] * 3
    assert both["difference"].iloc[1] == pytest.approx(-0.6 * slope, abs=1e-3)
    monkeypatch.setattr(command, "preset", preset)
    of_share = rows(printed)["why"]
    assert (of_share.iloc[4:] == "other rows: sample is 1.0, the preset has 0.01").all()
    assert not of_share.iloc[:4].str.startswith("other rows").any()


@pytest.mark.slow
def test_another_text_and_another_model_are_not_compared_with_what_is_printed(
    texts, options, tmp_path, claims, capsys
):
    texts.add("lab/other", "main", model_files("bert", 1))
    value = {**VALUE, "printed": "1"}
    entries = [value, {**value, "models": ["gpt2"]}, {**value, "group": "decoder"}]
    given = ["--model", "lab/other", "--claims", claims("yamagiwa2025", *entries)]
    given += ["--skip-first-positions", "1"]  # which the preset does not name
    rows = reproduced("yamagiwa2025", tmp_path / "out", *given, text=options["text"])
    assert set(rows["verdict"]) == {"not comparable"}
    said = capsys.readouterr().out.splitlines()[0]
    assert said.startswith("yamagiwa2025: steps final, text ")
    assert f"{options['text']} (preset: hf://datasets/rojagtap/bookcorpus)" in said
    assert "unit line, max_words 63, sample 1.0 (preset: 0.01), " in said
    assert said.endswith(", skip_first_positions 1 (preset: 0). The paper's text: some")
    assert "only a share" not in said
    assert rows["why"].tolist() == [
        "another text than the preset's: text.txt",
        "another model: gpt2 was not measured",
        "another model: a model known to be a decoder was not measured",
    ]


def test_a_share_that_a_preset_takes_of_its_own_text_is_said_of_another(texts, tmp_path, capsys):
    texts.add("lab/other", "main", model_files("bert", 1))
    own = tmp_path / "mine.txt"
    own.write_text("a line of words\n" * 50)
    given = ["--model", "lab/other", "--text", str(own), "--dry-run", "--out", str(tmp_path / "o")]
    assert main(["reproduce", "yamagiwa2025", *given]) == 0
    said = capsys.readouterr().out
    assert "only a share of 0.01 is taken, as the preset takes of its own: --sample 1" in said
    assert main(["reproduce", "yamagiwa2025", *given, "--sample", "1"]) == 0
    assert "only a share" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_bell_holds_and_a_flat_decoder_does_not(texts, tmp_path):
    for name, size in (("bell", 4.0), ("flat", 0.0)):
        texts.add(f"lab/{name}", "main", decoder_files(size))
    rows = reproduced("razzhigaev2024", tmp_path / "out", "--model", "lab/bell", "lab/flat")
    bells = rows[rows["claim"].str.contains("bell-shaped")].set_index("model")
    assert bells["verdict"].to_dict() == {"bell": "holds", "flat": "does not hold"}
    assert bells.loc["bell", "difference"] > 10 * bells.loc["bell", "difference_stderr"]
    others = rows[~rows["claim"].str.contains("bell-shaped")]
    assert set(others["verdict"]) == {"not comparable"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "verdicts"),
    [
        ((16, 3, 14, 6), ["holds", "holds", "holds"]),
        ((3, 8, 12, 16), ["does not hold", "holds", "does not hold"]),
    ],
)
def test_phases_of_the_effective_rank_are_found_where_they_are(texts, tmp_path, kept, verdicts):
    for step, coordinates in enumerate(kept):
        texts.add("lab/run", f"step{step}", ranked_files(coordinates))
    given = ["--model", "lab/run", "--steps", "all"]
    rows = reproduced("li2025", tmp_path / "out", *given, num_tokens=4096)
    page = (tmp_path / "out" / "reproduce" / "li2025.html").read_text()
    assert '<img src="li2025/figures/effective_rank_eigenvalues-dynamics.png"' in page
    of_rank = rows[rows["metric"] == "effective_rank_eigenvalues"]
    assert of_rank["verdict"].tolist() == verdicts
    if verdicts[0] == "holds":
        assert of_rank["why"].str.contains(r"^from step \d to step \d,").all()


CLAIM = {"at": "F", "claim": "C", "rule": "value", "metric": "Q", "layer": "middle", "printed": "1"}
LI = ("li2025", "--model", ".", "--claims")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((*LI, {"rule": "guess"}), "claim 1 of li2025: rule must be one of value, fact"),
        ((*LI, {"printed": "many"}), "printed must be a number, as text; got 'many'"),
        ((*LI, {"printed": 4.5}), "printed must be str; got 4.5"),
        ((*LI, {"printed": "inf"}), "printed must be a number, as text; got 'inf'"),
        ((*LI, {"layr": "x"}), "Claim has no argument 'layr'. Did you mean layer?"),
        ((*LI, {"metric": ""}), "rule value needs metric"),
        ((*LI, "/no/where.yaml"), "claims must be a YAML file; /no/where.yaml cannot be read"),
        (("nobody2020",), "invalid choice: 'nobody2020' (choose from 'yamagiwa2025'"),
        ((), "required: PAPER (embedgeo reproduce --help"),
        (("--num-tokens", "9", "li2025"), "PAPER: comes first, and options after it; got --num-"),
        (("li2025", "--nosuch", "1"), "unrecognized arguments: --nosuch 1"),
        (("li2025", "--model", "./nowhere"), "model must be a local path that exists"),
        (("li2025", "--text", "/no/where"), "text must be files that exist"),
        (("--config", "c.yaml"), "model must be given"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path, monkeypatch, capsys, claims, given, said):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("paper: li2025")
    arguments = [
        claims("li2025", {**CLAIM, **each}) if isinstance(each, dict) else each for each in given
    ]
    try:
        status = main(["reproduce", *arguments])
    except SystemExit as stopped:  # of a wrong option
        status = stopped.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said.rpartition("claim 1 of li2025: ")[2] in line
    assert ("claim 1 of li2025" in line) == any(isinstance(each, dict) for each in given)


# ── the rules
# ──────────────────────────────────────────────────────────────────────────────────────────────────


NAN = float("nan")
FLAT = [5.0] * 7
BELL = list(np.sin(np.linspace(0, np.pi, 13)) + 1)
BROAD = [1.0, *[1.5] * 11, 1.0]
EARLY = [1.0, 3.0, *[1.5] * 10, 1.0]
ZIGZAG = [1.0, 2.0] * 7
FALLEN = [float(5 + x) for x in np.cos(np.linspace(0, 3 * np.pi, 13))]
SETTLED = [1.0, 2.0, 2.8, 3.0, 3.0]
STEPS = [0, 10, 40, 60, 100]
in_the_middle = partial(peak, in_the_middle=True)
down = partial(falling, trend)
in_phase = {which: partial(phase, which=which) for which in (1, 2, 3)}
settled = partial(settles, steps=STEPS)


@pytest.mark.parametrize(
    ("rule", "values", "error", "verdict"),
    [
        (peak, FLAT, 0.01, "does not hold"),
        (peak, FLAT, 1.0, "not comparable"),
        (peak, FLAT, NAN, "not comparable"),
        (peak, [1.0, 2.0], 0.1, "not comparable"),
        (in_the_middle, BELL, 0.01, "holds"),
        (in_the_middle, BROAD, 0.01, "holds"),
        (in_the_middle, EARLY, 0.01, "does not hold"),
        (peak, EARLY, 0.01, "holds"),  # over steps it may be anywhere
        (partial(falling, in_the_middle), [3 - x for x in BELL], 0.01, "holds"),
        (partial(falling, in_the_middle), BELL, 0.01, "does not hold"),
        *((rule, FALLEN, 0.01, "holds") for rule in in_phase.values()),
        *((in_phase[i], [10 - x for x in FALLEN], 0.01, "does not hold") for i in (1, 3)),
        (in_phase[1], [1, 2, 3, 4], 10.0, "not comparable"),
        (in_phase[1], [1, 2, 3, 4], 0.01, "does not hold"),
        (in_phase[2], [4, 3, 2, 1], 0.01, "does not hold"),
        *((rule, [2, 1, 4, 3], NAN, "not comparable") for rule in in_phase.values()),
        (trend, [1, 2, 3, 4], NAN, "holds"),
        (down, [1, 2, 3, 4], 0.01, "does not hold"),
        (trend, [1, 2, 3], 0.01, "not comparable"),
        (trend, ZIGZAG, 0.1, "does not hold"),
        (trend, ZIGZAG, 0.6, "not comparable"),
        (trend, ZIGZAG, NAN, "not comparable"),
        (trend, [1 + 1e-4 * i for i in range(9)], 1e-6, "does not hold"),  # too small to see
        (settled, SETTLED, 0.01, "holds"),
        (settled, SETTLED, 2.0, "not comparable"),
        (settled, SETTLED, NAN, "not comparable"),
        (settled, [1.0, 3.0, 2.0, 1.8, 1.8], 0.01, "does not hold"),  # rises, then falls
        (settled, [1.0, 1.2, 1.8, 2.2, 3.0], 0.01, "does not hold"),  # grows to the end
        (settled, [3.0, 2.0, 1.2, 1.0, 1.0], 0.01, "does not hold"),
        (partial(settles, steps=STEPS[:3]), [1.0, 2.0, 3.0], 0.01, "not comparable"),
    ],
)
def test_planted_shapes_hold_where_they_are_right_and_do_not_where_they_are_wrong(
    rule, values, error, verdict
):
    names = [f"at {i}" for i in range(len(values))]
    of = Series(names, np.array(values, dtype=float), error * np.eye(len(values)))
    found = rule(of)
    assert found.verdict == verdict
    if rule not in (trend, down) and np.isnan(error):
        assert found.why.endswith("no standard error: sweep with --jackknife 16, or more tokens")


def test_noise_is_rarely_a_peak_a_phase_or_a_trend():
    # so noisy that a visible change could hide
    flat = 1 + 0.1 * np.random.default_rng(13).standard_normal((1000, 13))
    runs = [Series([*"abcdefghijklm"], each, 0.1 * np.eye(13)) for each in flat]
    found = [[rule(of).verdict for of in runs] for rule in (peak, *in_phase.values(), trend)]
    # one of forty or twenty, and three standard errors
    assert max(verdicts.count("holds") for verdicts in found) <= 25 + 3 * 5
    assert max(verdicts.count("does not hold") for verdicts in found[1:]) <= 50 + 3 * 7


@pytest.mark.parametrize(
    ("measured", "error", "printed", "verdict"),
    [
        (-0.249, 0.0, "-0.2", "holds"),
        (-0.251, 0.0, "-0.2", "does not hold"),
        (-0.251, 0.01, "-0.2", "holds"),
        (-1.02, 0.005, "-1.008", "does not hold"),
        (-0.2, 0.1, "-0.2", "not comparable"),
        (-0.2, NAN, "-0.2", "not comparable"),
        (1.54e-5, 0.0, "1.5e-5", "holds"),
        (1.56e-5, 0.0, "1.5e-5", "does not hold"),
        (2.4e6, 0.0, "2e6", "holds"),
    ],
)
def test_a_printed_value_holds_within_two_errors_and_its_rounding(
    measured, error, printed, verdict
):
    claim = Claim(**{**CLAIM, "printed": printed})
    assert near(measured, error, claim.number, claim.tolerance, 1e9).verdict == verdict
    about = Claim(**{**CLAIM, "printed": "-0.2", "within": 0.1})
    assert near(-0.29, 0.0, about.number, about.tolerance, 1e9).verdict == "holds"


# ── claims of each rule about what is planted
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def verdict(measured, others=(), **claim):
    return judge(Claim(at="F", claim="C", **claim), measured, [measured, *others])


RISES, FALLS = [0.1, 0.3, 0.5, 0.6, 0.7, 0.8], [0.8, 0.7, 0.6, 0.5, 0.3, 0.1]
BULGES, SAGS = [1.0, 2.0, 4.0, 5.0, 4.0, 2.0, 1.0], [5.0, 4.0, 2.0, 1.0, 2.0, 4.0, 5.0]
FALLS_LAST = [1.0, 2.0, 3.0, 4.0, 5.0, 0.5]
OVER_STEPS = np.repeat([[1.0], [2.0], [2.8], [3.0], [3.0]], 3, axis=1)
RISE_AND_FALL = np.repeat([[1.0], [3.0], [2.0], [1.5], [1.2]], 3, axis=1)


@pytest.mark.parametrize(
    ("claim", "right", "wrong", "steps"),
    [
        ({"rule": "value", "layer": "max", "printed": "0.8"}, RISES, BULGES, (0,)),
        ({"rule": "value", "layer": "min", "printed": "-1", "within": 0.1}, [-1.08, 3], [-2, 3], 0),
        ({"rule": "above", "layer": "deeper", "limit": 0.5}, RISES, FALLS, 0),
        ({"rule": "above", "layer": "all", "limit": 0.05}, RISES, [0, 1, -1, 1, 1, 1], 0),
        ({"rule": "below", "layer": "middle"}, [1, 1, -1, 1], [-1, -1, 1, -1], 0),
        ({"rule": "below", "layer": "last"}, [1, 1, -1], [1, 1, -8.5e-5], 0),  # no effect
        ({"rule": "trend", "direction": "up"}, RISES, FALLS, 0),
        ({"rule": "trend", "direction": "down"}, FALLS, RISES, 0),
        ({"rule": "peak", "over": "layers", "direction": "up"}, BULGES, SAGS, 0),
        ({"rule": "peak", "over": "layers", "direction": "down"}, SAGS, BULGES, 0),
        ({"rule": "settles", "direction": "up"}, OVER_STEPS, RISE_AND_FALL, STEPS),
        ({"rule": "settles", "direction": "down"}, 5 - OVER_STEPS, OVER_STEPS, STEPS),
        ({"rule": "peak", "over": "steps", "direction": "up"}, RISE_AND_FALL, OVER_STEPS, STEPS),
        ({"rule": "phase", "phase": 2, "start": "down"}, OVER_STEPS, 5 - OVER_STEPS, STEPS),
    ],
)
def test_a_claim_of_each_rule_holds_where_it_is_planted_and_not_where_its_opposite_is(
    claim, right, wrong, steps
):
    for values, expected in ((right, "holds"), (wrong, "does not hold")):
        found = verdict(planted({"Q": values}, steps or (0,), errors=1e-6), metric="Q", **claim)
        assert found.verdict == expected
        assert found.where
        assert np.isfinite([found.measured, found.error]).all()


def test_a_dip_is_told_as_the_smallest_value():
    found = verdict(
        planted({"Q": SAGS}, errors=1e-6), rule="peak", metric="Q", over="layers", direction="down"
    )
    assert found.why.startswith("the smallest value of the middle half, at hidden.03, less the")
    assert (found.measured, found.difference) == (1.0, -4.0)


def test_the_last_layer_can_be_left_out_of_a_trend():
    long = [*FALLS_LAST[:-1], 5.5, 0.5]
    claim = {"rule": "trend", "direction": "up", "metric": "V"}
    left_out = verdict(planted({"V": long}), layer="all but the last", **claim)
    assert left_out.verdict == "holds"
    assert left_out.measured == 1.0  # of all that are left
    assert verdict(planted({"V": long}), **claim).measured < 1.0
    falling_inside = planted({"V": [1.0, 5.0, 4.0, 3.0, 2.0, 1.5, 9.0]})
    assert verdict(falling_inside, layer="all but the last", **claim).verdict != "holds"


@pytest.mark.parametrize("sign", [1, -1])
def test_groups_are_in_order_or_not(sign):
    large, small = (planted({"Q": [x, 2 * x, 3 * x]}, group=str(x)) for x in (10.0, 1.0))
    order = {"rule": "order", "metric": "Q", "direction": "up" if sign > 0 else "down"}
    with_group = [
        planted({"Q": [x, 2 * x, 3 * x]}, group="encoder", errors=1e-3) for x in (1.0, 1.1)
    ]
    right, wrong = (large, small) if sign > 0 else (small, large)
    for layer, times in (("middle", 3.0), ("min", 1.0), ("span", 1.0)):
        if sign < 0 and times > 1:
            continue
        claim = {**order, "layer": layer, "times": times, "than": "encoder"}
        compared = with_group if sign > 0 else [planted({"Q": [5, 9, 13]}, group="encoder")]
        assert verdict(right, compared, **claim).verdict == "holds"
        assert verdict(wrong, compared, **claim).verdict == "does not hold"
    alone = verdict(large, layer="min", than="encoder", **order)
    assert alone.why == "no encoder was measured beside it"


def test_facts_of_models_are_the_printed_ones_or_not():
    facts = {"num_parameters": "109514298"}
    measured = planted({"Q": [1, 2, 3]}, facts=facts)
    printed = {
        "layers": ("3", "4"),
        "width": ("8", "9"),
        "parameters": ("110e6", "117e6"),
    }
    for metric, (right, wrong) in printed.items():
        for value, expected in ((right, "holds"), (wrong, "does not hold")):
            found = verdict(measured, rule="fact", metric=metric, printed=value)
            assert found.verdict == expected


def test_types_and_texts_are_counted_with_the_marks():
    counts = {"num_types": 5, "num_types_once": 1, "num_sequences": 100, "num_tokens": 1200}
    measured = planted({"token_types": [7, 7, 7]}, **counts)
    for metric, (right, wrong) in {
        "types": ("7", "30"),
        "occurrences": ("1200", "9000"),
        "texts": ("100", "500"),
    }.items():
        for printed, expected in ((right, "holds"), (wrong, "does not hold")):
            found = verdict(measured, rule="value", metric=metric, printed=printed, least_rows=1000)
            assert found.verdict in (expected, "not comparable")
            assert found.measured == float(right.replace(",", ""))
    few = verdict(measured, rule="value", metric="texts", printed="100", least_rows=10**6)
    assert few.why == "too few rows: 1,200, and 1,000,000 are needed"


SLOPES = {"metric": "V_on_M_slope", "rule": "below", "layer": "middle"}


def regressed(types, slope):
    count = len(types[types["layer"] == types["layer"].min()])
    values = {"V_on_M_slope": [slope] * 5, "token_types_regressed": [count] * 5}
    return planted(values, tokens=types, errors=1e-6)


def test_a_slope_over_types_holds_with_enough_of_them_and_its_error_has_the_choice_of_types():
    found = verdict(regressed(planted_types(400, -0.5), -0.5), **SLOPES)
    assert found.verdict == "holds"
    assert 1e-4 < found.error < 0.02  # the jackknife's was a millionth
    wrong = verdict(regressed(planted_types(400, 0.5), 0.5), **SLOPES)
    assert wrong.verdict == "does not hold"
    few = verdict(regressed(planted_types(30, 0.5), 0.486), **SLOPES)
    assert few.verdict == "too few types"
    assert few.why == "30 token types in the range, and 150 are needed"


def test_two_types_do_not_make_a_slope_nor_does_one_that_is_too_small():
    types = planted_types(300, 0.0, noise=0.5, outliers=[(1000.0, 10.0), (1200.0, -90.0)])
    made_by_two = verdict(regressed(types, -0.08), **SLOPES)
    assert made_by_two.verdict != "holds"
    small = verdict(regressed(planted_types(300, 0.0, noise=0.0), -8.5e-5), **SLOPES)
    assert small.verdict == "does not hold"


def test_slopes_of_raw_values_and_of_the_size_of_words_come_from_the_table():
    types = planted_types(400, 0.0)
    types["Q"] = 10 + np.log10(types["n"])
    types["num_tokens"] = np.tile([1.0, 2.0], len(types) // 2)
    types["M"] = 3 - types["num_tokens"]
    measured = regressed(types, 0.0)
    raw = {"layer": "middle", "rule": "above", "metric": "Q_raw_slope"}
    found = verdict(measured, **raw)
    assert found.verdict == "holds"
    mean = types.loc[types["layer"] == "hidden.02", "Q"].mean()
    assert found.measured == pytest.approx(1 / mean, rel=1e-3)
    size = {"layer": "middle", "rule": "below", "metric": "M_size_slope"}
    assert verdict(measured, **size).verdict == "holds"
    assert verdict(measured, **{**size, "rule": "above"}).verdict == "does not hold"
    assert verdict(measured, rows="words", **size).why.startswith("other rows: rows is 'tokens'")


def test_what_is_not_there_is_said():
    measured = planted({"Q": RISES})
    assert verdict(measured, rule="trend", metric="M", direction="up").why == "M was not measured"
    assert (
        verdict(measured, rule="settles", metric="Q", direction="up").why
        == "a final model has no steps"
    )
    shown = verdict(measured, rule="unchecked", metric="Q", layer="last", why="no number")
    assert (shown.verdict, shown.measured) == ("not comparable", 0.8)
    few = verdict(measured, rule="trend", metric="Q", direction="up", least_types=150)
    assert few.verdict == "too few types"
