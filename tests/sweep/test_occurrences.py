"""Which token types have their occurrences kept in a sweep, and what is kept of them."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer

from embedgeo.functional import types_by_frequency
from embedgeo.results.folder import SweepFolder
from embedgeo.results.parquet import read_table
from embedgeo.sweep import SweepSettings
from embedgeo.sweep.texts import frequent_types
from embedgeo.text.tokenizing import SpelledWords, TokenizedText
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import TEXT, local_run, model, tokenize_sequences


def test_occurrences_are_kept_in_the_plane_of_their_own_axes(tmp_path, options):
    run, text = local_run(tmp_path / "run", steps=(2,)), "\n".join(TEXT * 8)
    Path(options["text"]).write_text(text)
    options |= {"num_tokens": 512, "token_tables": True}
    assert sweep(str(run), **options) == 0
    tokenizer = AutoTokenizer.from_pretrained(run / "step2")
    ids = tokenize_sequences([text], tokenizer, seq_len=16, num_tokens=512)
    types, n = ids.unique(return_counts=True)
    is_text = torch.tensor([len(tokenizer.decode([i]).strip()) >= 3 for i in types.tolist()])
    shown = types[types_by_frequency(n, is_text)].tolist()
    assert len(shown) > 1
    assert all(10 <= n[types == each] <= 50 for each in shown)  # so all occurrences are kept
    folder = SweepFolder(options["out"])
    table = folder.read_tables("step2")["occurrences"]
    assert list(table) == ["layer", "layer_index", "token_id", "n", "pc1", "pc2", "token"]
    assert list(table["layer"].unique()) == ["embed", "block.00", "block.01", "final_norm"]
    hidden = model(2)(ids, output_hidden_states=True).hidden_states[1].detach().double()
    at = table[table["layer"] == "block.00"]
    assert set(at["token_id"]) == set(shown)
    x = torch.cat([hidden[ids == each] for each in sorted(shown)]).numpy()
    axes = np.linalg.svd(x - x.mean(0))[2][:2]
    axes *= np.sign(axes[np.arange(2), np.abs(axes).argmax(1)])[:, None]
    assert at["token_id"].tolist() == [
        each for each in sorted(shown) for _ in range(int(n[types == each]))
    ]
    np.testing.assert_allclose(at[["pc1", "pc2"]], x @ axes.T, rtol=1e-4, atol=1e-6)
    for row in at.itertuples():
        assert (row.n, row.token) == (
            int(n[types == row.token_id]),
            tokenizer.decode([row.token_id]),
        )


def test_folders_of_earlier_versions_have_ids_in_place_of_texts(tmp_path, options):
    run = local_run(tmp_path / "run", steps=(1,))
    assert sweep(str(run), **options, token_tables=True) == 0
    path = Path(options["out"]) / "tokens" / "step1.parquet"
    before = pd.read_parquet(path)
    before.drop(columns=["token", "num_tokens"]).to_parquet(path)
    table = read_table(path)
    assert table["token"].tolist() == before["token_id"].astype(str).tolist()
    assert (table["num_tokens"] == 1).all()
    # too few of each token
    assert "occurrences" not in SweepFolder(options["out"]).read_tables("step1")


SPELLED = {0: "the", 1: " cat", 2: "[CLS]", 3: "a", 4: "   "}
TOKENS = torch.tensor([2, 0, 1, 3, 4] * 30)
TEXTS = TokenizedText(TOKENS, torch.full((30,), 5))


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({}, {0, 1}),
        ({"ignore_token_ids": [0]}, {1}),
        ({"skip_first_positions": 2}, {1}),
        ({"rows": "first", "skip_first_positions": 1}, {0}),
        ({"rows": "last", "ignore_token_ids": [3, 4]}, {1}),
        ({"rows": "last"}, set()),
    ],
)
def test_types_are_chosen_by_how_often_their_rows_count(asked, shown):
    settings = SweepSettings("lab/x", **{"seq_len": 5, **asked})
    assert set(frequent_types(TEXTS, SPELLED, [2], settings)) == shown


def test_words_are_chosen_by_how_often_they_occur():
    first = torch.arange(30)[:, None] * 2
    numbers = (
        (torch.tensor([[0, 0, 0, 1, -1]]) + first)
        .where(torch.tensor([True] * 4 + [False]), -1)
        .flatten()
    )
    types = torch.tensor([0, 0, 0, 1, -1] * 30)
    text = TEXTS._replace(words=SpelledWords(numbers, types, ["thecat", "dog"]))
    settings = SweepSettings("lab/x", seq_len=5, rows="words", skip_first_positions=3)
    assert frequent_types(text, {0: "thecat", 1: "dog"}, [0, 1], settings) == (1,)
    assert set(
        frequent_types(text, {0: "thecat", 1: "dog"}, [0, 1], SweepSettings("lab/x", rows="words"))
    ) == {0, 1}
