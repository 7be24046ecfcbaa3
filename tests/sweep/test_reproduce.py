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
from embedgeo.reproduce import command
from embedgeo.reproduce.claims import read_claims
from embedgeo.reproduce.command import peak, phase, printed_value, trend
from embedgeo.results.folder import SweepFolder
from tests.sweep.papers import FEWER, dataset_files, decoder_files, model_files, ranked_files

pytestmark = pytest.mark.usefixtures("unpainted")

PAPERS = ("yamagiwa2025", "razzhigaev2024", "li2025")
VERDICTS = {"holds", "does not hold", "not comparable"}


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
        assert len(printed) == 4
        assert printed["why"].str.startswith("not enough tokens").all()
        of_pictures = rows[rows["rule"] == "picture"].set_index("at")["why"]
        assert of_pictures["Figure 3"] == "nothing that is measured belongs to it"
        assert of_pictures["Figure 22"] == "it is of what was not measured"
        assert of_pictures["Figure 8"] == "a picture, for you to compare"
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
TOKEN = {"at": "T", "claim": "V", "rule": "token", "metric": "V", "token": "e", "layer": "middle"}


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
    count = {"at": "T", "claim": "n", "rule": "count", "metric": "occurrences", "models": []}

    def rows(printed):
        entries = [
            {**each, "printed": value}
            for each, values in zip((VALUE, TOKEN, count), printed, strict=True)
            for value in values
        ]
        given = ["--model", BERT, "--claims", claims("yamagiwa2025", *entries)]
        return reproduced("yamagiwa2025", tmp_path / "out", *given, num_tokens=30000)

    slope, of_token, occurrences = rows([["-0.5"], ["1.0"], ["1000"]])["measured"]
    table = pd.read_parquet(tmp_path / "out" / "tokens" / "main.parquet")
    middle = table[(table["layer"] == "hidden.01") & (table["token"] == "e")]
    assert of_token == pytest.approx(middle["V"].iloc[0])
    text = yaml.safe_load((tmp_path / "out" / "manifest.json").read_text())["text"]
    assert occurrences == text["num_tokens"] - 2 * text["num_sequences"]
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
    texts, options, tmp_path, claims
):
    texts.add("lab/other", "main", model_files("bert", 1))
    value = {**VALUE, "printed": "1"}
    entries = [value, {**value, "models": ["gpt2"]}, {**value, "group": "decoder"}]
    given = ["--model", "lab/other", "--claims", claims("yamagiwa2025", *entries)]
    rows = reproduced("yamagiwa2025", tmp_path / "out", *given, text=options["text"])
    assert set(rows["verdict"]) == {"not comparable"}
    assert rows["why"].tolist() == [
        "another text: text.txt",
        "another model: gpt2 was not measured",
        "another model: a model known to be a decoder was not measured",
    ]


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
        ((*LI, {"rule": "guess"}), "claim 1 of li2025: rule must be one of value, token"),
        ((*LI, {"printed": "many"}), "printed must be a number, as text; got 'many'"),
        ((*LI, {"printed": 4.5}), "printed must be str; got 4.5"),
        ((*LI, {"printed": "inf"}), "printed must be a number, as text; got 'inf'"),
        ((*LI, {"layr": "x"}), "has 'layr', which is no field. Did you mean layer?"),
        ((*LI, {"layer": ""}), "rule value needs layer"),
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


NAN = [float("nan")] * 13
FLAT = [5.0] * 7
BELL = list(np.sin(np.linspace(0, np.pi, 13)) + 1)
BROAD = [1.0, *[1.5] * 11, 1.0]
EARLY = [1.0, 3.0, *[1.5] * 10, 1.0]
ZIGZAG = [1.0, 2.0] * 7
FALLEN = [float(5 + x) for x in np.cos(np.linspace(0, 3 * np.pi, 13))]


@pytest.mark.parametrize(
    ("rule", "values", "error", "more", "verdict"),
    [
        (peak, FLAT, 0.01, {}, "does not hold"),
        (peak, FLAT, 1.0, {}, "not comparable"),
        (peak, FLAT, NAN[0], {}, "not comparable"),
        (peak, [1.0, 2.0], 0.1, {}, "not comparable"),
        (peak, BELL, 0.01, {"in_the_middle": True}, "holds"),
        (peak, BROAD, 0.01, {"in_the_middle": True}, "holds"),
        (peak, EARLY, 0.01, {"in_the_middle": True}, "does not hold"),
        (peak, EARLY, 0.01, {}, "holds"),  # over steps it may be anywhere
        *((phase, FALLEN, 0.01, {"which": which}, "holds") for which in (1, 2, 3)),
        *(
            (phase, [10 - x for x in FALLEN], 0.01, {"which": which}, "does not hold")
            for which in (1, 3)
        ),
        (phase, [1, 2, 3, 4], 10.0, {"which": 1}, "not comparable"),
        (phase, [1, 2, 3, 4], 0.01, {"which": 1}, "does not hold"),
        (phase, [4, 3, 2, 1], 0.01, {"which": 2}, "does not hold"),
        *((phase, [2, 1, 4, 3], NAN[0], {"which": which}, "not comparable") for which in (1, 2, 3)),
        (trend, [1, 2, 3, 4], NAN[0], {"direction": "up"}, "holds"),
        (trend, [1, 2, 3, 4], 0.01, {"direction": "down"}, "does not hold"),
        (trend, [1, 2, 3], 0.01, {"direction": "up"}, "not comparable"),
        (trend, ZIGZAG, 0.1, {"direction": "up"}, "does not hold"),
        (trend, ZIGZAG, 0.6, {"direction": "up"}, "not comparable"),
        (trend, ZIGZAG, NAN[0], {"direction": "up"}, "not comparable"),
    ],
)
def test_planted_shapes_hold_where_they_are_right_and_do_not_where_they_are_wrong(
    rule, values, error, more, verdict
):
    errors = [error] * len(values)
    given = (values, more["direction"], errors) if rule is trend else (values, errors)
    found = rule(*given, **{name: value for name, value in more.items() if name != "direction"})
    assert found.verdict == verdict
    if rule is not trend and np.isnan(error):
        assert found.why.endswith("no standard error: sweep with --jackknife 16, or more tokens")


def test_noise_is_rarely_a_peak_a_phase_or_a_trend():
    # so noisy that a visible change could hide
    flat = 1 + 0.1 * np.random.default_rng(13).standard_normal((1000, 13))
    errors = [0.1] * 13
    rules = [peak, *(partial(phase, which=which) for which in (1, 2, 3))]
    found = [[rule(list(each), errors).verdict for each in flat] for rule in rules]
    found.append([trend(list(each), "up", errors).verdict for each in flat])
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
        (-0.2, float("nan"), "-0.2", "not comparable"),
        (1.54e-5, 0.0, "1.5e-5", "holds"),
        (1.56e-5, 0.0, "1.5e-5", "does not hold"),
        (2.4e6, 0.0, "2e6", "holds"),
    ],
)
def test_a_printed_value_holds_within_two_errors_and_its_rounding(
    measured, error, printed, verdict
):
    claim = type(read_claims("li2025").claims[0])(**{**CLAIM, "printed": printed})
    assert printed_value(claim, measured, error).verdict == verdict
