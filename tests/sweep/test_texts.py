"""Sweeps over texts of any length, against the model run on one text at a time."""

from pathlib import Path

import pandas as pd
import pytest
import sentencex
import torch
import torch.nn.functional as F
from transformers import (
    FlaubertConfig,
    Gemma3TextConfig,
    Gemma3TextModel,
    PreTrainedConfig,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5EncoderModel,
)

import embedgeo
from embedgeo.checkpoints.loading import is_encoder
from embedgeo.results.folder import SweepFolder
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

DOCUMENT = "\n".join(
    [*TEXT, "", "So it is.  Is it? It is!", " ", "A line", "and another of the same sentence."]
)
SENTENCES = [
    *(text.strip() for text in sentencex.segment("en", "\n".join(TEXT))),
    *("So it is.", "Is it?", "It is!", "A line\nand another of the same sentence."),
]
AROUND = {
    "bert": ("[CLS]", "[SEP]"),
    "mobilebert": ("[CLS]", "[SEP]"),
    "gpt2": ("<|endoftext|>", "<|endoftext|>"),
}
SAMPLED = (
    *("intrinsic_dimension", "intrinsic_dimension_std"),
    # of a type's rows, or of copies, one is drawn
    *("intrinsic_dimension_between", "intrinsic_dimension_within"),
)
"""Of the rows in the order in which they came."""


@pytest.fixture
def small(tmp_path):
    (tmp_path / "text.txt").write_text(DOCUMENT)
    texts = {"text": tmp_path / "text.txt", "seq_len": 64, "num_tokens": 4096, "batch_size": 3}
    return {**texts, "unit": "sentence", "dtype": "float64"}


def tokens_of(kind, text):
    tokenizer = tokenizer_of(checkpoint_of(kind))
    before, after = tokenizer.convert_tokens_to_ids(AROUND[kind])
    return [before, *tokenizer(text, add_special_tokens=False)["input_ids"][:62], after]


def checkpoint_of(kind):
    """A checkpoint whose tokenizer, if it is GPT-2's, names its only special token BOS, too."""
    files = checkpoint_files(1, kind)
    if kind == "gpt2":
        files = changed(files, "tokenizer_config.json", bos_token="<|endoftext|>")
    return files


def values(frame):
    at = frame[~frame["metric"].isin(SAMPLED)]
    return at.set_index(["layer", "metric"])["value"].sort_index()


@pytest.mark.parametrize("kind", AROUND)
def test_sentences_are_measured_as_observe_does_and_the_loss_is_of_real_tokens(
    small, tmp_path, kind
):
    write_files(tmp_path / "run/step1", checkpoint_of(kind))
    special = {"special_tokens": "bos+eos"} if kind == "gpt2" else {}
    assert sweep(tmp_path / "run", **small, **special, out=tmp_path / "out") == 0
    found = values(pd.read_parquet(tmp_path / "out/checkpoints/step1.parquet"))

    rows = [tokens_of(kind, sentence) for sentence in SENTENCES]
    made, losses = model(1, kind, torch.float64), []
    with embedgeo.observe(made) as geometry, torch.no_grad():
        for ids in rows:
            logits = made(torch.tensor([ids])).logits[0]
            losses.append(
                F.cross_entropy(logits[:-1].float(), torch.tensor(ids[1:]), reduction="sum")
            )
    wanted = values(geometry.to_frame())
    assert wanted.index.equals(found.drop(MODEL).index)
    pd.testing.assert_series_equal(found.drop(MODEL), wanted, rtol=1e-9, atol=1e-12)
    assert set(found.xs("n", level="metric")) == {sum(map(len, rows))}
    if kind == "gpt2":
        assert found[MODEL, "loss"] == pytest.approx(
            float(sum(losses)) / sum(len(ids) - 1 for ids in rows), rel=1e-6
        )

    text = SweepFolder(tmp_path / "out").manifest()["text"]
    assert (text["num_sequences"], text["num_tokens"]) == (len(rows), sum(map(len, rows)))


@pytest.mark.usefixtures("reader")
def test_every_model_has_the_tokenizer_of_its_own(small, tmp_path):
    write_files(tmp_path / "bert/step1", checkpoint_files(1, "bert"))
    write_files(tmp_path / "gpt/step1", checkpoint_of("gpt2"))
    names = [str(tmp_path / "bert"), str(tmp_path / "gpt")]
    assert sweep(names, **small, out=tmp_path / "out") == 0
    text = SweepFolder(tmp_path / "out").manifest()["text"]
    rows = {
        kind: [tokens_of(kind, sentence) for sentence in SENTENCES] for kind in ("bert", "gpt2")
    }
    assert {name: entry["num_tokens"] for name, entry in text.items()} == {
        names[0]: sum(map(len, rows["bert"])),
        names[1]: sum(len(ids) - 2 for ids in rows["gpt2"]),
    }


@pytest.mark.usefixtures("reader")
def test_a_tokenizer_that_now_gives_other_tokens_is_refused(small, tmp_path):
    local_run(tmp_path / "run", (1,))
    sweep(tmp_path / "run", **small, out=tmp_path / "out")
    for steps in ((1,), (1, 2)):
        local_run(tmp_path / "run", steps)
        for step in steps:
            write_files(tmp_path / f"run/step{step}", tokenizer_files("bert"))
        with pytest.raises(ValueError, match="the tokenizer no longer gives those of"):
            sweep(tmp_path / "run", **small, out=tmp_path / "out")


def test_texts_that_cannot_be_or_do_not_fit_are_refused(small, tmp_path):
    local_run(tmp_path / "run", (1,))
    for options, rule in (
        ({"unit": "page"}, "unit must be one of sequence, line, sentence, document; got 'page'"),
        ({"sample": 0.0}, "sample must be a share above 0"),
        ({"min_words": 5, "max_words": 4}, "min_words must be at most max_words"),
        ({"unit": "sequence", "max_words": 64}, "are about texts; unit is 'sequence'"),
        ({"min_words": 1000}, "text must have at least one text that unit, min_words, max_words"),
        ({"num_tokens": 2}, "num_tokens must be enough for the first text; got 2"),
    ):
        with pytest.raises(ValueError, match=rule):
            sweep(tmp_path / "run", **{**small, **options}, out=tmp_path / "out")
    assert not Path(tmp_path / "out").exists()


@pytest.mark.usefixtures("reader")
def test_the_default_length_is_what_the_model_has_positions_for_and_a_longer_one_is_refused(
    small, tmp_path, printed
):
    run = local_run(tmp_path / "run", (1,))
    del small["seq_len"]
    options = {**small, "unit": "sequence"}
    assert sweep(run, **options, out=tmp_path / "default") == 0
    said = printed()
    assert f"{run} has 64 positions: seq_len is 64 in place of 512" in said
    manifest = SweepFolder(tmp_path / "default").manifest()
    assert (manifest["asked"]["seq_len"], manifest["text"]["seq_len"]) == (512, 64)
    with pytest.raises(
        ValueError, match=r"the model's 64 positions; got 512\. Give --seq-len 64\."
    ):
        sweep(run, **options, seq_len=512, out=tmp_path / "new")


def test_words_are_the_means_of_their_tokens_that_count(small, tmp_path):
    kind = "gpt2"
    write_files(tmp_path / "run/step1", checkpoint_of(kind))
    special = {
        "special_tokens": "bos+eos",
        "skip_first_positions": 3,
        "ignore_token_ids": tokens_of(kind, "o")[1:-1],
    }
    sweep(
        tmp_path / "run",
        **small,
        **special,
        rows="words",
        token_tables=True,
        out=tmp_path / "out",
    )
    found = values(pd.read_parquet(tmp_path / "out/checkpoints/step1.parquet"))

    tokenizer, made = tokenizer_of(checkpoint_of(kind)), model(1, kind, torch.float64)
    rows, sizes = {}, {}
    for sentence in SENTENCES:
        ids, places = (
            tokens_of(kind, sentence),
            tokenizer(sentence, add_special_tokens=False).word_ids(),
        )
        with torch.no_grad():
            hidden = made(torch.tensor([ids]), output_hidden_states=True).hidden_states[1][0]
        for place in dict.fromkeys(places):
            at = [
                i + 1 for i, other in enumerate(places) if other == place and i + 1 < len(ids) - 1
            ]
            kept = [i for i in at if i >= 3 and ids[i] not in special["ignore_token_ids"]]
            word = tokenizer.decode([ids[i] for i in at]).strip()
            if kept and word:
                rows.setdefault(word, []).append(hidden[kept].mean(0))
                sizes.setdefault(word, []).append(len(kept))
    x = torch.cat([torch.stack(each) for each in rows.values()])
    at = found.xs("block.00", level="layer")
    assert at["n"] == len(x)
    assert at["Q"] == pytest.approx(float(x.square().sum(1).mean()), rel=1e-9)
    assert at["M"] == pytest.approx(float(x.mean(0).square().sum()), rel=1e-9)
    assert at["token_types"] == len(rows)

    table = pd.read_parquet(tmp_path / "out/tokens/step1.parquet")
    for row in table[table["layer"] == "block.00"].itertuples():
        word = row.token
        assert row.n == len(rows[word])
        assert row.num_tokens == pytest.approx(sum(sizes[word]) / len(sizes[word]))
        assert (
            pytest.approx(float(torch.stack(rows[word]).mean(0).square().sum()), rel=1e-9) == row.M
        )


@pytest.mark.usefixtures("reader")
def test_the_positions_up_to_that_of_padding_are_not_the_texts(small, tmp_path):
    config = RobertaConfig(vocab_size=300, max_position_embeddings=40, pad_token_id=1, **SIZES)
    RobertaForMaskedLM(config).save_pretrained(tmp_path / "roberta")
    write_files(tmp_path / "roberta", tokenizer_files("bert"))
    small["out"] = str(tmp_path / "out")
    with pytest.raises(ValueError, match="at most the model's 38 positions; got 39"):
        sweep(tmp_path / "roberta", **{**small, "seq_len": 39})
    assert sweep(tmp_path / "roberta", **{**small, "seq_len": 38}) == 0


ENCODER = T5Config(vocab_size=300, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
GEMMA = {"vocab_size": 300, "head_dim": 8, "num_key_value_heads": 2, "pad_token_id": 0, **SIZES}


@pytest.mark.parametrize(
    "made",
    [
        T5EncoderModel(ENCODER),
        Gemma3TextModel(Gemma3TextConfig(**GEMMA, use_bidirectional_attention=True)),
    ],
)
def test_an_encoder_without_a_head_has_its_special_tokens_and_no_loss(small, tmp_path, made):
    made.save_pretrained(tmp_path / "encoder")
    write_files(tmp_path / "encoder", tokenizer_files("bert"))
    with pytest.warns(UserWarning, match="no loss is recorded of .*: it gives no logits of each"):
        assert sweep(tmp_path / "encoder", **small, out=tmp_path / "out") == 0
    records = pd.read_parquet(tmp_path / "out/checkpoints/encoder.parquet")
    text = SweepFolder(tmp_path / "out").manifest()["text"]
    assert set(records[records["metric"] == "n"]["value"]) == {text["num_tokens"]}
    assert {"V_W", "M"} <= set(records[records["layer"] == "final_norm"]["metric"])
    assert "loss" not in set(records["metric"])


def test_an_encoder_is_known_by_its_masked_head():
    assert is_encoder(FlaubertConfig(architectures=["FlaubertWithLMHeadModel"]))
    assert not is_encoder(FlaubertConfig(causal=True))
    assert is_encoder(PreTrainedConfig(auto_map={"AutoModelForMaskedLM": "a.B"}))
    assert not is_encoder(PreTrainedConfig(auto_map={"AutoModelForCausalLM": "a.B"}))
