"""Local folders: two names of a step, and tables over strings."""

import pandas as pd
import pytest
import torch

from tests.sweep.sweeping import sweep
from tests.sweep.tiny import (
    TEXT,
    checkpoint_files,
    local_run,
    tokenize_sequences,
    tokenizer_files,
    tokenizer_of,
    write_files,
)


def test_two_names_for_a_step_are_refused(tmp_path, options):
    local_run(tmp_path / "run", steps=(1,))
    local_run(tmp_path / "run", steps=(1,), name="step0{}")
    with pytest.raises(ValueError, match=r"all name step 1\. .* on the Hub; of a folder"):
        sweep(tmp_path / "run", **options)
    with pytest.raises(ValueError, match=r"is local. Use steps"):
        sweep(tmp_path / "run", **options, revisions="step1")


def test_token_types_may_be_strings_without_the_mark_of_a_words_start(tmp_path, options):
    write_files(tmp_path / "model", checkpoint_files(1))
    tokenizer = tokenizer_of(tokenizer_files())
    ignored = tokenizer.convert_tokens_to_ids(["Ġat"])
    asked = {"token_tables": True, "types": "string", "ignore_token_ids": ignored}
    assert sweep(tmp_path / "model", **options, **asked) == 0
    ids = tokenize_sequences(["\n".join(TEXT)], tokenizer, seq_len=16, num_tokens=64)
    spelled = {}
    for i in ids.unique().tolist():
        if i not in ignored:
            piece = tokenizer.convert_ids_to_tokens(i)
            spelled.setdefault(piece.removeprefix("Ġ") or piece, []).append(i)
    assert max(map(len, spelled.values())) > 1
    table = pd.read_parquet(options["out"] / "tokens" / "model.parquet")
    found = table[table["layer"] == "block.00"].set_index("token_id")
    assert found.index.tolist() == sorted(map(min, spelled.values()))
    for of_string in spelled.values():
        assert found["n"][min(of_string)] == torch.isin(ids, torch.tensor(of_string)).sum()
