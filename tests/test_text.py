"""Text read, cut into texts and tokenized."""

import gzip
import json
import os

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from embedgeo.functional.sampling import row_keys
from embedgeo.text import Documents, builtin_corpus, cut_sequences, split_held_out
from embedgeo.text.reading import cut_texts
from embedgeo.text.tokenizing import chosen_special_tokens, tokenize_joined, tokenize_texts
from tests.sweep.tiny import TEXT, tokenizer_files, write_files

PACKED = gzip.compress("".join(TEXT).encode(), mtime=0)
DOCUMENTS = [
    "Dr. Smith came. He\nleft.\n \nNo stop here\n\nThe end!  ",
    " \n",
    "One line\r\nand another.\n",
]


def read(*paths):
    return [*Documents([*map(str, paths)])]


def test_plain_jsonl_and_gz_give_the_same_documents(tmp_path):
    lines = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXT) + "\n"
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(TEXT[0].encode()))
    for name in ("a.jsonl", "b.jsonl.gz"):
        assert read(tmp_path / name) == TEXT
    assert read(tmp_path / "c.txt.gz", tmp_path / "a.jsonl") == [TEXT[0], *TEXT]
    assert [*Documents()] == builtin_corpus()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        *(("a.jsonl", line) for line in (b'{"txt": 1}\n', b"no\n", b"[1]", b"[" * 10**5)),
        *(("a.jsonl", b'{"text": %b}' % value) for value in (b"1", b"null", b'"\\ud800"')),
        *(
            ("a.txt.gz", data)
            for data in (b"no", PACKED[:-9], PACKED[:12] + b"\xff" * 9 + PACKED[21:])
        ),
        ("a.txt", b"\xff\xfe"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=name):
        read(tmp_path / name)
    with pytest.raises(ValueError, match="missing"):
        read(tmp_path / "missing.txt")


def test_json_lines_by_another_name_and_other_tables_are_refused(tmp_path):
    lists = {
        "a": b'\n[{"text": "One."}, {"text": "Two."}]',
        "b": b'{"messages": [1]}',
        "c": b'["One."]',
        "utf-16": "One.".encode("utf-16-le"),
    }
    for name in ("a.json.gz", "a.csv", "a.txt", "a.jl", *lists):
        lines = lists.get(name, b'{"text": "One."}\n')
        (tmp_path / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
        with pytest.raises(ValueError, match=rf"by the name \.jsonl .*{name} is not\. Rename"):
            read(tmp_path / name)
    (tmp_path / "a.txt").write_text('"One", [1] says.')
    assert read(tmp_path / "a.txt") == ['"One", [1] says.']


def test_a_byte_order_mark_is_no_text_and_line_ends_are_those_of_python(tmp_path):
    text = "ä→𝄞 and\nso on"
    for name in ("a.txt", "A.JSONL", "a.Jsonl.GZ", "b.v2.jsonl"):
        line = json.dumps({"text": text}, ensure_ascii=False) + "\n"
        data = (text if name == "a.txt" else line).replace("\n", "\r\n").encode("utf-8-sig")
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("GZ") else data)
        assert read(tmp_path / name) == [text]


def test_a_long_file_is_read_as_far_as_it_is_needed(tmp_path):
    line = b"A line of some words that are not needed.\n"
    data = line * 2**19 + b"\xff"
    (tmp_path / "a.txt").write_bytes(data)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(data, 1)[:-20])
    for name in ("a.txt", "b.txt.gz"):
        documents = Documents([str(tmp_path / name)])
        first = next(iter(documents))
        assert len(first) < len(data)
        assert first.encode() == line * (len(first) // len(line))
        assert documents.is_streamed


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", tmp_path, tmp_path / "pipe"):
        with pytest.raises(
            ValueError,
            match=f"{path} is not readable: it is no file. Of a folder, a device or a",
        ):
            read(path)


@pytest.mark.parametrize(("kind", "space"), [("gpt", " "), ("bert", "")])
def test_tokens_of_a_long_line_are_those_of_the_whole(tmp_path, kind, space):
    made = made_tokenizer(tmp_path, kind)
    line = space.join(" ".join(TEXT).split() * 300)
    whole = made(line, add_special_tokens=False)["input_ids"]
    asked = {"special_tokens": "none"}
    joined = tokenize_joined([line, "x"], made, seq_len=8, num_tokens=512, **asked)
    assert joined.token_ids.tolist() == whole[:512]
    texts = tokenize_texts([line, line], made, max_length=50, num_tokens=102, **asked)
    assert texts.token_ids.tolist() == whole[:50] * 2
    assert texts.num_cut == 2
    rest = tokenize_joined([line, "x"], made, seq_len=1, num_tokens=len(whole) + 1, **asked)
    assert rest.token_ids.tolist() == [*whole, *made("x", add_special_tokens=False)["input_ids"]]


def test_every_twelfth_run_of_sixteen_paragraphs_is_held_out():
    _, held_out = split_held_out([str(i) for i in range(200)])
    assert held_out.split() == [str(i) for i in range(176, 192)]
    train, held_out = split_held_out(builtin_corpus())
    assert not set(train.split("\n\n")) & set(held_out.split("\n\n"))


def test_tokens_that_fill_no_sequence_are_left_out():
    assert cut_sequences([[1, 2, 3], [4, 5]], seq_len=2).tolist() == [[1, 2], [3, 4]]


def made_tokenizer(folder, kind, **names):
    made = AutoTokenizer.from_pretrained(write_files(folder, tokenizer_files(kind)))
    for name, token in names.items():
        setattr(made, name, token)
    return made


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        (
            "line",
            ["Dr. Smith came. He", "left.", "No stop here", "The end!", "One line", "and another."],
        ),
        (
            "sentence",
            [
                "Dr. Smith came.",
                "He\nleft.",
                "No stop here",
                "The end!",
                "One line\r\nand another.",
            ],
        ),
        ("document", [DOCUMENTS[0].strip(), DOCUMENTS[2].strip()]),
        ("sequence", DOCUMENTS),
    ],
)
def test_documents_are_cut_into_texts_without_blank_ones(unit, expected):
    assert list(cut_texts(DOCUMENTS, unit)) == expected


def test_words_are_separated_by_white_space_and_counted():
    texts = ["a", "b  c", "d e\nf", "g h i j"]
    assert list(cut_texts(texts, "document", min_words=2, max_words=3)) == texts[1:3]
    assert list(cut_texts(texts, "document", min_words=2)) == texts[1:]


@pytest.mark.parametrize("unit", ["line", "sequence"])
def test_a_share_of_the_texts_is_drawn_whatever_is_asked_of_their_words(unit):
    texts = [f"{i}" + " word" * (i % 3) for i in range(10_000)]
    kept = list(cut_texts(texts, unit, share=0.01))
    assert kept == [
        text
        for text, key in zip(texts, row_keys(0, 10_000, seed=0).tolist(), strict=True)
        if key < 0.01
    ]
    assert 70 < len(kept) < 130
    longer = [text for text in kept if len(text.split()) > 1]
    assert list(cut_texts(texts, unit, share=0.01, min_words=2)) == longer


@pytest.mark.parametrize("kind", ["gpt", "bert"])
@pytest.mark.parametrize("special", ["default", "none", "bos", "bos+eos"])
def test_each_text_has_its_special_tokens_and_is_cut_to_its_length_with_them(
    tmp_path, kind, special
):
    made = made_tokenizer(
        tmp_path, kind, **({"bos_token": "<|endoftext|>"} if kind == "gpt" else {})
    )
    names = ("bos", "eos") if kind == "gpt" else ("cls", "sep")
    bos, eos = ([getattr(made, f"{name}_token_id")] for name in names)
    before, after = {"none": ([], []), "bos": (bos, []), "bos+eos": (bos, eos)}.get(
        special, ([], []) if kind == "gpt" else (bos, eos)
    )
    plain = [made(text, add_special_tokens=False)["input_ids"] for text in TEXT]
    wanted = [[*before, *ids[: 40 - len(before) - len(after)], *after] for ids in plain]
    found = tokenize_texts(TEXT, made, max_length=40, num_tokens=1000, special_tokens=special)
    assert [ids.tolist() for ids in found.token_ids.split(found.lengths.tolist())] == wanted
    assert found.num_cut == sum(len(before) + len(ids) + len(after) > 40 for ids in plain) > 0
    sequences = tokenize_joined(
        TEXT, made, seq_len=10, num_tokens=45, special_tokens=special, for_encoder=kind == "bert"
    ).token_ids.view(-1, 10)
    for row in sequences.tolist():
        assert row[: len(before)] == before
        assert row[len(row) - len(after) :] == after
    room = 10 - len(before) - len(after)
    inner = sequences[:, len(before) : 10 - len(after)].flatten().tolist()
    assert inner == [token for ids in plain for token in ids][: 4 * room]


@pytest.mark.parametrize("unknown", [None, "<s>"])
def test_special_tokens_are_those_around_any_letter(unknown):
    made = Tokenizer(models.BPE({"<s>": 0, "A": 1, "C": 2}, [], unk_token=unknown))
    made.add_special_tokens(["<s>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A <s>", special_tokens=[("<s>", 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=made)
    assert chosen_special_tokens(fast, "default") == ([0], [0])


def test_whole_texts_are_taken_in_order_while_they_fit(tmp_path):
    made = made_tokenizer(tmp_path, "gpt")
    lengths = [len(made(text)["input_ids"]) for text in TEXT]
    taken = iter(TEXT * 2)
    found = tokenize_texts(taken, made, max_length=64, num_tokens=lengths[0] + lengths[1])
    assert found.lengths.tolist() == lengths[:2]
    assert len(list(taken)) == 4  # read no further than needed


def test_every_token_has_its_word_and_words_spelled_alike_are_of_one_type(tmp_path):
    made = made_tokenizer(tmp_path, "bert")
    texts = ["the dog, the worst dog", "foolishness\n the"]
    found = tokenize_texts(texts, made, max_length=64, num_tokens=999, with_words=True)
    ids, types, spelled = found.words
    for text, token_ids, of, kinds in zip(
        texts,
        *(x.split(found.lengths.tolist()) for x in (found.token_ids, ids, types)),
        strict=True,
    ):
        assert of[0] == of[-1] == kinds[0] == kinds[-1] == -1  # [CLS] and [SEP]
        in_order = dict.fromkeys(of[of >= 0].tolist())
        words = [made.decode(token_ids[of == word].tolist()).strip() for word in in_order]
        assert words == text.replace(",", " ,").split()
        assert words == [spelled[int(kinds[of == word][0])] for word in in_order]
    assert spelled == ["the", "dog", ",", "worst", "foolishness"]
    assert ((types >= 0) == (ids >= 0)).all()
    assert not set(ids[: found.lengths[0]].tolist()[1:-1]) & set(
        ids[found.lengths[0] :].tolist()[1:-1]
    )


def test_sequences_cut_words_and_documents_end_them(tmp_path):
    made = made_tokenizer(tmp_path, "gpt")
    documents = ["dog", "dog", "foolishness"]
    found = tokenize_joined(documents, made, seq_len=2, num_tokens=100, with_words=True)
    pieces = [made.decode([token]) for token in found.token_ids.tolist()]
    ids = found.words.word_ids.tolist()
    for i in range(len(ids) - 1):
        starts_text = "".join(pieces[: i + 1]) in ("dog", "dogdog")
        assert (ids[i] != ids[i + 1]) == (starts_text or i % 2 == 1)


def test_words_need_a_tokenizer_that_tells_them(tmp_path):
    made = made_tokenizer(tmp_path, "gpt")
    as_llama = Tokenizer(models.BPE({letter: i for i, letter in enumerate("▁theog d")}, []))
    as_llama.normalizer, as_llama.decoder = (
        normalizers.Replace(" ", "▁"),
        decoders.Replace("▁", " "),
    )
    whole = PreTrainedTokenizerFast(tokenizer_object=as_llama)
    with pytest.raises(ValueError, match="tells words apart; this one takes 'the dog' as one"):
        tokenize_texts(["the dog"], whole, max_length=64, num_tokens=99, with_words=True)

    def slow(text, **options):
        return made(text, **options)

    with pytest.raises(ValueError, match="says which word a token is of"):
        tokenize_texts(
            ["the dog"], slow, max_length=64, num_tokens=99, with_words=True, special_tokens="none"
        )
