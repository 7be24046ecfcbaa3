import gzip
import json

import pytest
import torch
from transformers import AutoTokenizer

from embedgeo.text import builtin_corpus, hash_documents, read_documents, special_tokens_around, tokenize_sequences
from tests.sweep.tiny import TEXT, tokenizer_files, write_files

PACKED = gzip.compress("".join(TEXT).encode())


@pytest.fixture(params=["gpt", "bert"])
def tokenizer(request, tmp_path):
    return AutoTokenizer.from_pretrained(write_files(tmp_path / "tokenizer", tokenizer_files(request.param)))


def test_plain_jsonl_and_gz_give_the_same_documents(tmp_path):
    lines = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXT) + "\n"
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(TEXT[0].encode()))
    assert read_documents([tmp_path / "a.jsonl"]) == read_documents([tmp_path / "b.jsonl.gz"]) == TEXT
    assert read_documents([tmp_path / "c.txt.gz", tmp_path / "a.jsonl"]) == [TEXT[0], *TEXT]
    assert read_documents() == builtin_corpus()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        *(("a.jsonl", line) for line in (b'{"txt": 1}\n', b"no\n", b"[1]", b"[" * 10**5)),
        *(("a.jsonl", b'{"text": %b}' % value) for value in (b"1", b"null", b'"\\ud800"')),
        *(("a.txt.gz", data) for data in (b"no", PACKED[:-9], PACKED[:12] + b"\xff" * 9 + PACKED[21:])),
        ("a.txt", b"\xff\xfe"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=name):
        read_documents([tmp_path / name])
    with pytest.raises(ValueError, match="missing"):
        read_documents([tmp_path / "missing.txt"])


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.txt", "A.JSONL", "a.Jsonl.GZ", "b.v2.jsonl"])
def test_a_byte_order_mark_names_the_encoding_and_is_no_text(tmp_path, name, encoding):
    text = "ä→𝄞 and so on"
    written = json.dumps({"text": text}, ensure_ascii=False) + "\n" if "json" in name.lower() else text
    data = written.encode(encoding)
    data = b"\xfe\xff" + data if encoding == "utf-16-be" else data
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("GZ") else data)
    assert read_documents([tmp_path / name]) == [text]


@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        ("Größe".encode("latin-1"), "utf-8.* can't decode byte 0xf6 .*iconv -f LATIN1 -t UTF-8"),
        ("plain".encode("utf-16-le"), "zero bytes, as text in UTF-16 does.*iconv -f UTF-16LE -t UTF-8"),
        ("plain".encode("utf-16")[:-1], "utf-16.* truncated data"),
        (b"\xff\xfe", "nothing but a byte order mark"),
    ],
    ids=["latin-1", "utf-16 without a mark", "half of a character", "a mark alone"],
)
def test_text_of_another_encoding_is_named(tmp_path, data, remedy):
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.txt is not readable: .*{remedy}"):
        read_documents([tmp_path / "a.txt"])


def test_hashes_tell_boundaries_apart():
    assert hash_documents(["ab", "c"]) != hash_documents(["a", "bc"])


def test_decoder_text_is_joined_and_cut_without_special_tokens(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(write_files(tmp_path, tokenizer_files("gpt")))
    whole = [token for text in TEXT for token in tokenizer(text)["input_ids"]]
    ids = tokenize_sequences(TEXT, tokenizer, seq_len=8, num_tokens=40)
    assert ids.flatten().tolist() == whole[:40]
    assert special_tokens_around(tokenizer) == ([], [])


def test_encoder_sequences_have_their_special_tokens_inside(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(write_files(tmp_path, tokenizer_files("bert")))
    ids = tokenize_sequences(TEXT, tokenizer, seq_len=10, num_tokens=45, for_encoder=True)
    assert ids.shape == (4, 10)
    assert (ids[:, 0] == tokenizer.cls_token_id).all()
    assert (ids[:, -1] == tokenizer.sep_token_id).all()
    plain = [token for text in TEXT for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert ids[:, 1:-1].flatten().tolist() == plain[:32]
    assert not torch.isin(ids[:, 1:-1], torch.tensor(tokenizer.all_special_ids)).any()


def test_text_that_is_too_short_is_refused(tokenizer):
    for for_encoder in (False, True):
        with pytest.raises(ValueError, match="at least one sequence"):
            tokenize_sequences(["a"], tokenizer, seq_len=512, num_tokens=1024, for_encoder=for_encoder)
    with pytest.raises(ValueError, match="num_tokens must fill"):
        tokenize_sequences(TEXT, tokenizer, seq_len=512, num_tokens=100)
    with pytest.raises(ValueError, match="at least 1 token"):
        tokenize_sequences(TEXT, tokenizer, seq_len=0, num_tokens=100)
