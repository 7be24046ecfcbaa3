"""The papers beside what is measured of small models, through a local Hub: verdicts on what is
planted in them.
"""

import re
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
import yaml

from embedgeo.cli import main
from embedgeo.presets import preset
from embedgeo.studies import reproduce as command
from embedgeo.studies.claims import read_claims
from embedgeo.studies.reproduce import exceeds, flatter, peak, phase, printed_value, trend
from tests.sweep.papers import FEWER, dataset_files, decoder_files, model_files, ranked_files

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
    for i, model in enumerate(asked["model"]):
        steps = (
            ["main"]
            if asked["steps"] == "final"
            else ["main", *(f"step{s}-tokens{s}B" for s in (1, 2, 4))]
        )
        for revision in steps:
            texts.add(model, revision, model_files(model, i + len(revision)))
    rows = reproduced(paper, tmp_path / "out")
    assert set(rows["verdict"]) <= VERDICTS
    assert rows["why"].notna().all()
    claims = read_claims(paper).claims
    assert set(zip(rows["at"], rows["claim"], strict=True)) == {
        (each.at, each.claim) for each in claims
    }
    page = (tmp_path / "out" / "reproduce" / f"{paper}.html").read_text()
    pictures = [unquote(path) for path in re.findall(r'<img src="([^"]+)"', page)]
    assert all((tmp_path / "out" / "reproduce" / path).is_file() for path in pictures)
    drawn = {Path(path).stem for path in pictures}
    assert (tmp_path / "out" / "reproduce" / paper / "index.html").is_file()
    undecided = (rows["verdict"] == "not comparable").sum()
    assert f"{undecided} not comparable" in capsys.readouterr().out
    # a few thousand tokens of a small model are not 12 million of a large one
    if paper == "yamagiwa2025":
        printed = rows[rows["rule"] == "value"]
        assert len(printed) == 4
        assert printed["why"].str.startswith("not enough tokens").all()
        numbers = {int(number) for claim in claims for number in re.findall(r"\d+", claim.at)}
        assert numbers >= {*range(1, 12), 13, 14, *range(16, 23)}  # 12 and 15 are between others
        of_pictures = rows[rows["rule"] == "picture"].set_index("at")["why"]
        assert of_pictures["Figure 3"] == "nothing that is measured belongs to it"
        assert of_pictures["Figure 22"] == "it is of what was not measured"
        assert of_pictures["Figure 8"] == "a picture, for you to compare"
        assert {"gpt2-tokens-V-against-M", "M_over_Q-compared-profiles"} <= drawn
        (spread,) = rows[(rows["metric"] == "Q_t_cv") & (rows["model"] == "gpt2")].itertuples()
        random = float(spread.why.rpartition("independent of their tokens: ")[2])
        assert 0 < random < 1


BERT = "google-bert/bert-base-uncased"


@pytest.fixture
def claims(tmp_path):
    """Writes a file with claims of a paper."""

    def written(paper, *entries):
        path = tmp_path / "claims.yaml"
        about = {
            "title": "T",
            "authors": "A",
            "url": "https://arxiv.org/abs/0",
            "text": "some",
            "claims": [*entries],
        }
        path.write_text(yaml.safe_dump({paper: about}))
        return str(path)

    return written


@pytest.mark.slow
def test_printed_values_hold_where_they_are_right_and_do_not_where_they_are_wrong(
    texts, tmp_path, claims, monkeypatch
):
    few = {name: FEWER["yamagiwa2025"][name] for name in ("sample", "seq_len")}
    monkeypatch.setattr(command, "preset", lambda paper: preset(paper) | few)
    texts.add(BERT, "main", model_files(BERT, 1))
    slope = {
        "at": "Figure 2",
        "claim": "slope",
        "rule": "value",
        "metric": "V_on_M_slope",
        "layer": "middle",
    }
    token = {
        "at": "Table 2",
        "claim": "V",
        "rule": "token",
        "metric": "V",
        "token": "e",
        "layer": "middle",
    }
    counts = [
        {"at": "T", "claim": key, "rule": "count", "metric": key, "models": []}
        for key in ("types", "occurrences")
    ]

    def rows(*printed, out="out", **options):
        entries = [
            {**each, "printed": value}
            for each, value in zip((slope, token, *counts), printed, strict=True)
        ]
        given = ["--model", BERT, "--claims", claims("yamagiwa2025", *entries)]
        return reproduced(
            "yamagiwa2025", tmp_path / out, *given, **{"num_tokens": 30000, **options}
        )

    first = rows("-0.5", "1.0", "100", "1000")
    assert not first["measured"].isna().any()
    error = first["stderr"].iloc[0]
    assert 0 < 8 * error < abs(first["measured"].iloc[0])
    table = pd.read_parquet(tmp_path / "out" / "tokens" / "main.parquet")
    middle = table[(table["layer"] == "hidden.01") & (table["token"] == "e")]
    assert first["measured"].iloc[1] == pytest.approx(middle["V"].iloc[0])
    text = yaml.safe_load((tmp_path / "out" / "manifest.json").read_text())["text"]
    assert first["measured"].iloc[3] == text["num_tokens"] - 2 * text["num_sequences"]
    # the table has those of the range alone
    assert first["measured"].iloc[2] >= table["token_id"].nunique() - 2
    right = rows(*(f"{value:.12f}" for value in first["measured"]))
    assert right["verdict"].tolist() == ["holds"] * 4
    wrong = rows(*(f"{value * 1.6:.3f}" for value in first["measured"]))
    assert wrong["verdict"].iloc[:2].tolist() == ["does not hold"] * 2
    assert wrong["difference"].iloc[0] == pytest.approx(-0.6 * first["measured"].iloc[0], abs=1e-3)
    wrong = rows(*(f"{value * 1.5:.0f}" for value in first["measured"]))
    assert wrong["verdict"].iloc[3] == "does not hold"
    cut = rows("-0.5", "1.0", "100", "1000", num_tokens=3000, out="cut")
    assert (
        cut["why"].iloc[2:]
        == "other rows: the sample may go on where they end, for num tokens is 3,000"
    ).all()
    monkeypatch.setattr(command, "preset", preset)
    of_share = rows("-0.5", "1.0", "100", "1000")
    assert (of_share["why"].iloc[2:] == "other rows: sample is 1.0, the preset has 0.01").all()
    assert not of_share["why"].iloc[:2].str.startswith("other rows").any()


@pytest.mark.slow
def test_the_figures_of_one_model_are_those_of_the_paper_at_its_layers(texts, tmp_path, claims):
    texts.add("lab/deep", "main", decoder_files(4.0))  # 4 blocks: the input and all of them
    entry = {"claim": "C", "rule": "picture"}
    entries = [
        {**entry, "at": "Figure 2", "shown": "tokens-V-against-M"},
        {**entry, "at": "Figure 3"},
        {**entry, "at": "Figure 5", "shown": ["M_over_Q-profile", "nothing-profile"]},
        {
            "at": "T",
            "claim": "C",
            "rule": "token",
            "metric": "V",
            "token": "e",
            "layer": "middle",
            "printed": "1",
        },
    ]
    path = claims("yamagiwa2025", *entries)
    file = yaml.safe_load(Path(path).read_text())
    file["yamagiwa2025"]["layers"] = 5
    Path(path).write_text(yaml.safe_dump(file))
    rows = reproduced("yamagiwa2025", tmp_path / "out", "--model", "lab/deep", "--claims", path)
    assert rows["verdict"].iloc[:3].tolist() == ["not comparable"] * 3
    report = tmp_path / "out" / "reproduce" / "yamagiwa2025"
    shown = pd.read_csv(report / "figures" / "tokens-V-against-M.csv")
    assert shown["layer"].unique().tolist() == [f"hidden.0{i}" for i in range(5)]
    assert (report / "tables" / "tokens-examples.csv").is_file()  # of the token of the table
    page = (report.parent / "yamagiwa2025.html").read_text()
    names = re.findall(r'<img src="yamagiwa2025/figures/(.+?)\.png"', page)
    assert names == ["tokens-V-against-M", "M_over_Q-profile"]
    again = reproduced("yamagiwa2025", tmp_path / "out", "--model", "lab/deep", "--claims", path)
    assert again["why"].tolist() == rows["why"].tolist()


@pytest.mark.slow
def test_another_text_and_another_model_are_not_compared_with_what_is_printed(
    texts, options, tmp_path, claims
):
    texts.add("lab/other", "main", model_files("bert", 1))
    value = {
        "at": "F",
        "claim": "C",
        "rule": "value",
        "metric": "V_on_M_slope",
        "layer": "middle",
        "printed": "1",
    }
    given = ["--model", "lab/other", "--claims"]
    given.append(
        claims("yamagiwa2025", value, {**value, "models": ["gpt2"]}, {**value, "group": "decoder"})
    )
    rows = reproduced("yamagiwa2025", tmp_path / "a", *given, text=options["text"])
    assert set(rows["verdict"]) == {"not comparable"}
    assert rows["why"].iloc[0] == "another text: text.txt"
    assert rows["why"].iloc[1] == "another model: gpt2 was not measured"
    assert rows["why"].iloc[2] == "another model: a model known to be a decoder was not measured"
    rows = reproduced("yamagiwa2025", tmp_path / "b", *given, max_words=20)
    assert rows["why"].iloc[0] == "other rows: max words is 20, the preset has 63"


@pytest.mark.slow
def test_a_bell_holds_and_a_flat_decoder_does_not(texts, tmp_path):
    for name, size in (("bell", 4.0), ("flat", 0.0)):
        texts.add(f"lab/{name}", "main", decoder_files(size))
    rows = reproduced("razzhigaev2024", tmp_path / "out", "--model", "lab/bell", "lab/flat")
    bells = rows[rows["claim"].str.contains("bell-shaped")].set_index("model")
    assert bells["verdict"].to_dict() == {"bell": "holds", "flat": "does not hold"}
    assert bells.loc["bell", "why"].startswith("the largest value of the middle half, at hidden.0")
    assert bells.loc["bell", "difference"] > 10 * bells.loc["bell", "difference_stderr"]
    others = rows[~rows["claim"].str.contains("bell-shaped")]
    assert set(others["verdict"]) == {"not comparable"}
    assert "a final model has no steps" in set(others["why"])


@pytest.mark.slow
def test_on_another_text_shapes_are_compared_and_on_other_rows_nothing_is(texts, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(
        "\n".join(" ".join(f"{word} {line}" for word in "abcdefghijklmnop") for line in range(60))
    )
    given = {"text": text, "unit": "line", "num_tokens": 1024}
    for step, coordinates in enumerate((16, 3, 14, 6)):
        texts.add("lab/run", f"step{step}", ranked_files(coordinates))
    rows = reproduced("li2025", tmp_path / "a", "--model", "lab/run", "--steps", "all", **given)
    measured = rows[rows["rule"] == "phase"]
    assert measured["why"].str.endswith("; another text: text.txt").all()
    rows = reproduced(
        "li2025",
        tmp_path / "b",
        "--model",
        "lab/run",
        "--steps",
        "all",
        rows="tokens",
        num_tokens=2048,
    )
    measured = rows[rows["rule"] == "phase"]
    assert set(measured["verdict"]) == {"not comparable"}
    assert set(measured["why"]) == {"other rows: rows is 'tokens', the preset has 'last'"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "verdicts"),
    [
        ((16, 3, 14, 6), {1: "holds", 2: "holds", 3: "holds"}),
        ((3, 8, 12, 16), {1: "does not hold", 2: "holds", 3: "does not hold"}),
    ],
)
def test_phases_of_the_effective_rank_are_found_where_they_are(texts, tmp_path, kept, verdicts):
    for step, coordinates in enumerate(kept):
        texts.add("lab/run", f"step{step}", ranked_files(coordinates))
    rows = reproduced(
        "li2025", tmp_path / "out", "--model", "lab/run", "--steps", "all", num_tokens=4096
    )
    page = (tmp_path / "out" / "reproduce" / "li2025.html").read_text()
    assert '<img src="li2025/figures/effective_rank_eigenvalues-dynamics.png"' in page
    of_rank = rows[rows["metric"] == "effective_rank_eigenvalues"]
    assert dict(zip((1, 2, 3), of_rank["verdict"], strict=True)) == verdicts
    if verdicts[1] == "holds":
        assert [why.partition(",")[0] for why in of_rank["why"]] == [
            "from step 0 to step 1",
            "from step 1 to step 2",
            "from step 2 to step 3",
        ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rule": "guess"}, "rule must be one of value, token"),
        ({"printed": "many"}, "printed must be a number, as text; got 'many'"),
        ({"printed": 4.5}, "printed must be str; got 4.5"),
        ({"printed": "inf"}, "printed must be a number, as text; got 'inf'"),
        ({"layr": "x"}, "has 'layr', which is no field. Did you mean layer?"),
        ({"layer": ""}, "rule value needs layer"),
    ],
)
def test_claims_that_cannot_be_are_refused_in_one_line(tmp_path, capsys, claims, change, said):
    claim = {
        "at": "F",
        "claim": "C",
        "rule": "value",
        "metric": "Q",
        "layer": "middle",
        "printed": "1",
    }
    given = claims("li2025", {**claim, **change})
    assert main(["reproduce", "li2025", "--model", str(tmp_path), "--claims", given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert "claim 1 of li2025" in line


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["nobody2020"],
            "invalid choice: 'nobody2020' (choose from 'yamagiwa2025', 'razzhigaev2024', 'li2025')",
        ),
        ([], "required: PAPER (embedgeo reproduce --help"),
        (
            ["--num-tokens", "9", "li2025"],
            "PAPER: comes first, and options after it; got --num-tokens before li2025",
        ),
        (["li2025", "--nosuch", "1"], "unrecognized arguments: --nosuch 1"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(capsys, given, said):
    with pytest.raises(SystemExit) as stopped:
        main(["reproduce", *given])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_paper_in_a_file_needs_a_model_beside_it(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("paper: li2025")
    assert main(["reproduce", "--config", str(tmp_path / "c.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "model must be given" in line


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--model", "./nowhere"], "model must be a local path that exists"),
        (
            ["--claims", "/no/where.yaml"],
            "claims must be a YAML file; /no/where.yaml cannot be read",
        ),
        (["--text", "/no/where"], "text must be files that exist"),
    ],
)
def test_what_is_not_there_is_named_in_one_line(capsys, given, said):
    assert main(["reproduce", "li2025", *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_dry_run_writes_no_page(texts, tmp_path, capsys):
    texts.add(BERT, "main", model_files(BERT, 1))
    assert (
        main(
            [
                "reproduce",
                "yamagiwa2025",
                "--model",
                BERT,
                "--out",
                str(tmp_path / "out"),
                "--dry-run",
            ]
        )
        == 0
    )
    assert "1 checkpoint" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


# ── the rules
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_noise_is_rarely_a_peak_a_phase_or_a_trend_and_a_clear_one_nearly_always():
    draws = np.random.default_rng(0)
    flat = 5 + 0.1 * draws.standard_normal((1000, 13))
    errors = [0.1] * 13
    assert np.mean([peak(list(each), errors).verdict == "holds" for each in flat]) < 0.05
    assert np.mean([trend(list(each), "up").verdict == "holds" for each in flat]) < 0.05
    shown = flat + np.sin(np.linspace(0, np.pi, 13))
    assert np.mean([peak(list(each), errors).verdict == "holds" for each in shown]) > 0.95
    fallen = flat + np.cos(np.linspace(0, 3 * np.pi, 13))
    for which in (1, 2, 3):
        assert (
            np.mean([phase(list(each), errors, which).verdict == "holds" for each in fallen]) > 0.95
        )
    assert (
        np.mean([trend(list(each), "down").verdict == "holds" for each in flat - np.arange(13) / 5])
        > 0.95
    )


def test_what_layers_and_steps_have_in_common_cancels_in_the_errors_of_differences():
    draws = np.random.default_rng(5)
    shape = 1 + 0.2 * np.sin(np.linspace(0, np.pi, 13))

    def measured(shape):
        of_groups = (
            shape[:, None] + draws.standard_normal(16) + 0.02 * draws.standard_normal((13, 16))
        )
        return of_groups.mean(1), (of_groups - of_groups.mean(1, keepdims=True)) / np.sqrt(16 * 15)

    values, deviations = measured(shape)
    errors = np.linalg.norm(deviations, axis=1)
    assert peak(values, errors, degrees=15).verdict == "not comparable"
    found = peak(values, deviations, degrees=15)
    assert found.verdict == "holds"
    assert found.error == pytest.approx(errors[6], rel=0.2)
    assert found.error_of_difference < 0.1 * found.error
    assert phase(-values, deviations, 1, degrees=15).verdict == "holds"
    flat = [measured(np.ones(13)) for _ in range(400)]
    assert [peak(*each, degrees=15).verdict for each in flat].count("holds") <= 10 + 3 * 3
    assert [phase(*each, 3, degrees=15).verdict for each in flat].count("holds") <= 10 + 3 * 3


def test_noise_with_errors_from_few_groups_is_rarely_a_peak_or_a_phase():
    draws = np.random.default_rng(3)
    flat = 1 + 0.1 * draws.standard_normal((1000, 13))
    errors = 0.1 * np.sqrt(draws.chisquare(15, (1000, 13)) / 15)  # of 16 groups
    both = [(list(each), list(error)) for each, error in zip(flat, errors, strict=True)]
    assert [peak(*each, degrees=15).verdict for each in both].count("holds") <= 25
    for which in (1, 2, 3):
        assert [phase(*each, which, degrees=15).verdict for each in both].count(
            "holds"
        ) <= 25 + 3 * 5


@pytest.mark.parametrize("count", [8, 20, 40])
@pytest.mark.parametrize("which", [1, 2, 3])
def test_a_phase_of_noise_holds_in_one_case_of_forty_and_does_not_fail_for_its_error(count, which):
    draws = np.random.default_rng(count)
    # so noisy that a visible change could hide
    flat = 1 + 0.1 * draws.standard_normal((1000, count))
    verdicts = [phase(list(each), [0.1] * count, which).verdict for each in flat]
    assert verdicts.count("holds") <= 25 + 3 * 5  # one of forty, and three standard errors
    assert verdicts.count("does not hold") <= 25 + 3 * 5
    exact = 1 + 0.001 * draws.standard_normal((100, count))
    verdicts = [phase(list(each), [0.001] * count, which).verdict for each in exact]
    assert verdicts.count("does not hold") >= 95  # it would have been seen
    shown = np.cos(np.linspace(0, 3 * np.pi, count))
    for sign, verdict in ((1, "holds"), (-1, "does not hold")):
        if which != 2 or sign == 1:  # what is upside down grows, too
            values = 5 + sign * shown if which == 2 or sign == 1 else 5 + np.arange(count)
            assert phase(list(values), [0.01] * count, which).verdict == verdict


def test_a_phase_without_an_error_is_never_said_to_fail():
    assert phase([1, 2, 3, 4], [10] * 4, 1).verdict == "not comparable"
    # the opposite, and clear
    assert phase([1, 5, 9, 12], [0.1, 0.3, 0.3, 0.3], 1).verdict == "does not hold"
    assert phase([1, 5, 9, 12], [0.1, 0.3, 0.3, 0.3], 3).verdict == "does not hold"
    assert phase([1, 2, 3, 4], [0.01] * 4, 1).verdict == "does not hold"
    assert phase([4, 3, 2, 1], [0.01] * 4, 2).verdict == "does not hold"
    for which in (1, 2, 3):
        for values in ([1, 2, 3, 4], [4, 3, 2, 1], [2, 1, 4, 3]):
            found = phase(values, [float("nan")] * 4, which)
            assert found.verdict == "not comparable"
            assert found.why.endswith(
                "no standard error: sweep with --jackknife 16, or more tokens"
            )


def test_a_trend_of_noise_is_not_said_to_fail_for_its_error():
    draws = np.random.default_rng(1)
    flat = 1 + 0.1 * draws.standard_normal((1000, 13))
    verdicts = [trend(list(each), "up", [0.1] * 13).verdict for each in flat]
    assert verdicts.count("does not hold") <= 50 + 3 * 7  # the range of all has two ends
    assert verdicts.count("holds") <= 25


def test_a_span_of_noise_is_neither_flatter_nor_not():
    draws = np.random.default_rng(2)
    spans = np.ptp(draws.standard_normal((1000, 4, 13)), axis=2)

    def verdicts(error, size, *, shape=0.0):
        each = [
            flatter(
                error * own, error * 2**0.5, [(size * x + shape, size * 2**0.5) for x in others], 13
            )
            for own, *others in spans
        ]
        return [found.verdict for found in each]

    for error, size in ((0.01, 1.0), (1.0, 0.01), (1.0, 1.0)):  # of the one, of the others
        assert verdicts(error, size).count("holds") <= 25
    assert verdicts(1.0, 0.01, shape=0.1).count("does not hold") <= 25 + 3 * 5
    assert verdicts(0.01, 0.01, shape=1.0).count("holds") == 1000
    assert flatter(2.0, 0.01, [(1.0, 0.01)], 13).verdict == "does not hold"
    assert flatter(2.0, float("nan"), [(1.0, 0.01)], 13).verdict == "not comparable"


def test_a_trend_fails_only_where_one_would_have_been_seen():
    assert trend([1, 2, 3, 4], "up").verdict == "holds"
    assert trend([1, 2, 3, 4], "down").verdict == "does not hold"
    assert trend([1, 2, 3], "up").verdict == "not comparable"
    assert trend([2, 1, 4, 3, 2.5], "up").why.endswith("too few layers to tell")
    zigzag = [1.0, 2.0] * 7
    assert trend(zigzag, "up").verdict == "does not hold"
    assert trend(zigzag, "up", [0.1] * 14).verdict == "does not hold"
    assert trend(zigzag, "up", [0.6] * 14).why.endswith("not enough tokens to tell")
    assert trend(zigzag, "up", [float("nan")] * 14).why.endswith("or more tokens")
    assert trend([1, 2, 3, 4], "up", [float("nan")] * 4).verdict == "holds"
    # the opposite is plain
    assert trend(range(13), "down", [float("nan")] * 13).verdict == "does not hold"
    flat = [5.001, 5.0] * 7
    assert trend(flat, "up", [0.01] * 14).verdict == "does not hold"
    assert trend(flat, "up", [0.3] * 14).verdict == "not comparable"


def test_what_is_flat_is_called_so_only_where_a_peak_would_have_been_seen():
    flat = [5.0] * 7
    assert peak(flat, [0.01] * 7).verdict == "does not hold"
    assert peak(flat, [1.0] * 7).verdict == "not comparable"
    assert peak(flat, [float("nan")] * 7).why.endswith(
        "no standard error: sweep with --jackknife 16, or more tokens"
    )
    assert peak([1.0, 2.0], [0.1, 0.1]).verdict == "not comparable"
    assert exceeds(1.0, 0.1, 0.5, 2) == "holds"
    assert exceeds(-1.0, 0.1, 0.5, 2) == "does not hold"
    assert exceeds(0.4, 0.3, 0.5, 2) == "not comparable"


def test_a_bell_has_its_peak_in_the_middle():
    errors = [0.01] * 13
    bell = np.sin(np.linspace(0, np.pi, 13)) + 1
    early = np.full(13, 1.5)
    early[[0, 12]] = 1.0
    assert peak(list(bell), errors, in_the_middle=True).verdict == "holds"
    assert peak(list(early), errors, in_the_middle=True).verdict == "holds"  # a broad one
    early[1] = 3.0
    found = peak(list(early), errors, in_the_middle=True)
    assert (found.verdict, found.difference) == ("does not hold", -1.5)
    assert "less a larger value outside of it, at 2" in found.why
    early[1] = 1.51
    assert peak(list(early), errors, in_the_middle=True).verdict == "not comparable"
    assert peak(list(early), errors).verdict == "holds"  # over steps it may be anywhere


def test_a_printed_value_holds_within_two_errors_and_its_rounding():
    def verdict(measured, error, printed):
        entry = {
            "at": "F",
            "claim": "C",
            "rule": "value",
            "metric": "Q",
            "layer": "last",
            "printed": printed,
        }
        return printed_value(
            type(read_claims("li2025").claims[0])(**entry), measured, error
        ).verdict

    assert verdict(-0.249, 0.0, "-0.2") == "holds"
    assert verdict(-0.251, 0.0, "-0.2") == "does not hold"
    assert verdict(-0.251, 0.01, "-0.2") == "holds"
    assert verdict(-1.02, 0.005, "-1.008") == "does not hold"
    assert verdict(-0.2, 0.1, "-0.2") == "not comparable"
    assert verdict(-0.2, float("nan"), "-0.2") == "not comparable"
    assert verdict(1.54e-5, 0.0, "1.5e-5") == "holds"
    assert verdict(1.56e-5, 0.0, "1.5e-5") == "does not hold"
    assert verdict(2.4e6, 0.0, "2e6") == "holds"
