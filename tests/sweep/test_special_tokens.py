"""What a tokenizer puts before a text, at the start of each sequence of a sweep."""

import json
from functools import cache

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer, SplinterConfig, SplinterModel

import embedgeo
from embedgeo.report.runs import read_folder
from embedgeo.report.summary import origins
from embedgeo.results.records import MODEL
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import (
    SIZES,
    TEXT,
    changed,
    checkpoint_files,
    local_run,
    model,
    tokenizer_files,
    tokenizer_of,
    write_files,
)

BOS = 0
"""The id of ``<|endoftext|>``, which the tokenizer here puts before a text."""


@cache
def with_bos():
    """Files of a tokenizer that puts a BOS token before each text."""
    files = dict(tokenizer_files("gpt"))
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", BOS)]
    )
    files["tokenizer.json"] = tokenizer.to_str().encode()
    return changed(files, "tokenizer_config.json", bos_token="<|endoftext|>")


@pytest.fixture
def small(tmp_path):
    """Options of a sweep of a checkpoint over three documents in sequences of 16 tokens."""
    run = local_run(tmp_path / "run", (1,))
    write_files(run / "step1", with_bos())
    lines = [json.dumps({"text": text}) for text in TEXT]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    return {
        "model": str(run),
        "text": tmp_path / "text.jsonl",
        "seq_len": 16,
        "num_tokens": 128,
        "batch_size": 4,
        "dtype": "float64",
    }


def plain_ids():
    tokenizer = tokenizer_of(with_bos())
    return [i for text in TEXT for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


def sequences(mode):
    """The sequences of a sweep with these special tokens, made by hand."""
    if mode == "default":
        ids = torch.tensor(plain_ids())[: 8 * 15].view(8, 15)
        return torch.cat((torch.full((8, 1), BOS), ids), 1)
    return torch.tensor(plain_ids())[:128].view(8, 16)


def observed(mode, skip):
    """Values of the same rows by hand, and the loss."""
    made = model(1, "gpt_neox", torch.float64)
    ids = sequences(mode)
    with embedgeo.observe(made, skip_first_positions=skip) as geometry, torch.no_grad():
        logits = made(ids).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return values(geometry.to_frame()), float(loss)


def values(frame):
    sampled = frame["metric"].str.startswith("intrinsic_dimension")
    return frame[~sampled].set_index(["layer", "metric"])["value"].sort_index()


@pytest.mark.parametrize(
    ("options", "skip", "begins_with"),
    [
        ({}, 1, "<|endoftext|>, no row"),
        ({"count_special": True}, 0, "<|endoftext|>, a row"),
        ({"special_tokens": "none"}, 0, "nothing, where the tokenizer puts <|endoftext|>"),
    ],
)
def test_each_sequence_begins_with_bos_which_is_a_row_if_asked_for(
    small, tmp_path, options, skip, begins_with, printed
):
    out = tmp_path / "out"
    assert sweep(**small, **options, out=out) == 0
    assert "taken as a decoder" not in printed()
    found = values(pd.read_parquet(out / "checkpoints/step1.parquet"))
    wanted, loss = observed(options.get("special_tokens", "default"), skip)
    pd.testing.assert_series_equal(found.drop(MODEL), wanted, rtol=1e-9, atol=1e-12)
    assert found[MODEL, "loss"] == pytest.approx(loss, rel=1e-6)
    assert set(found.xs("n", level="metric")) == {8 * (16 - skip)}
    text = json.loads((out / "manifest.json").read_text())["text"]
    assert text["begins_with"] == begins_with
    (run,) = read_folder(out)
    assert origins([run])["sequences begin with"].tolist() == [begins_with]


def test_what_is_not_known_to_predict_the_next_token_is_said_to_be_taken_so(
    small, tmp_path, printed
):
    SplinterModel(SplinterConfig(vocab_size=300, **SIZES)).save_pretrained(tmp_path / "run/step1")
    with pytest.warns(UserWarning, match="no loss"):
        sweep(**small, out=tmp_path / "out")
    said = "SplinterModel is taken as a decoder: sequences begin with <|endoftext|>, no row. If"
    assert said in printed()


def test_special_stands_for_what_the_tokenizer_names_or_flags_as_special(
    tmp_path, options, printed
):
    files = checkpoint_files(1, "bert")
    write_files(tmp_path / "run/step1", files)
    file = tmp_path / "tokenizer.json"
    file.write_bytes(files["tokenizer.json"])
    # the second is as the command line has it, and finds the same settings
    for special, out, more in (
        ("special", "out", {}),
        (["special"], "out", {}),
        ("special", "bare", {"tokenizer": file}),
    ):
        said = {**options, **more, "out": tmp_path / out}
        assert sweep(tmp_path / "run", **said, ignore_token_ids=special) == 0
        records = pd.read_parquet(tmp_path / out / "checkpoints/step1.parquet")
        assert set(records[records["metric"] == "n"]["value"]) == {64 - 2 * 4}
        assert ("no loss is recorded, as that of an encoder" in printed()) == bool(more)
    plain = changed(files, file.name, added_tokens=[], post_processor=None)
    write_files(tmp_path, {file.name: plain[file.name]})
    with pytest.raises(ValueError, match="special needs a tokenizer that names special tokens; "):
        sweep(tmp_path / "run", **said, ignore_token_ids="special")


def test_another_special_token_leaves_out_other_rows_and_is_refused(tmp_path, options):
    write_files(tmp_path / "run/step1", checkpoint_files(1, "bert"))
    options["ignore_token_ids"] = "special"
    assert sweep(tmp_path / "run", **options) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/step1")
    (common,) = tokenizer.tokenize(TEXT[0])[:1]  # has an id already
    tokenizer.add_special_tokens({"additional_special_tokens": [common]})
    tokenizer.save_pretrained(tmp_path / "run/step1")
    write_files(tmp_path / "run/step2", checkpoint_files(2, "bert"))
    tokenizer.save_pretrained(tmp_path / "run/step2")
    with pytest.raises(ValueError, match="tokenizer no longer gives those"):
        sweep(tmp_path / "run", **options)


def test_runs_that_need_other_texts_are_not_of_one_model(tmp_path):
    for name, kind in (("a-step{}", "gpt_neox"), ("b-step{}", "bert")):
        local_run(tmp_path / "runs", (1,), name, kind)
    with (
        pytest.raises(ValueError, match=r"must take the same texts; .* has a-step, b-step"),
        pytest.warns(UserWarning, match=r"runs of one checkpoint each: a-step1, b-step1\."),
    ):
        sweep(tmp_path / "runs", num_tokens=64, seq_len=16, out=tmp_path / "out")
