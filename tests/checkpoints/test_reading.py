"""Files of a checkpoint that are damaged or mean harm: the error names the file, and nothing in it
is run.
"""

import argparse
import json
import pickle
import re
import sys
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace

import jsonargparse
import pytest
import torch
import transformers

from embedgeo.checkpoints.files import (
    TOKENIZER_FILES,
    VOCABULARIES,
    Contents,
    StoredFile,
    stored_step,
    stored_values,
    weight_types,
)
from embedgeo.checkpoints.loading import (
    import_named,
    load_config,
    load_model,
    load_tokenizer,
)
from embedgeo.checkpoints.sources import list_checkpoints
from tests.files import Payload
from tests.sweep.tiny import TEXT, bin_file, checkpoint_files, tokenizer_files, write_files


def said(error):
    """An error's words: one line, without advice or colours."""
    line = str(error.value)
    assert not re.search(r"\n|\x1b|[Ww]eights.only|add_safe_globals|pytorch\.org", line)
    return line


SAFE = checkpoint_files(1)["model.safetensors"]
BIN = checkpoint_files(1, as_bin=True)["pytorch_model.bin"]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("model.safetensors", SAFE[:-100], "(not fully covered|MetadataIncompleteBuffer)"),
        ("model.safetensors", b"\x08\0\0\0\0\0\0\0not json" + bytes(10**5), "(JSON|InvalidHeader)"),
        ("model.safetensors", b"", "Safetensor"),
        ("pytorch_model.bin", BIN[:-20000], "cannot be read"),
        (
            "pytorch_model.bin",
            BIN[:200],
            "cannot be read: it is damaged, or was not written by torch.save.",
        ),
        ("pytorch_model.bin", b"version https://git-lfs.github.com/spec/v1\n" * 9, "damaged"),
        ("pytorch_model.bin", b"hello", "damaged"),
        ("pytorch_model.bin", b"", "damaged"),
        ("pytorch_model.bin", bin_file([1]), "must hold weights by their names"),
        ("pytorch_model.bin", bin_file({"state": {}}), "must hold weights by their names"),
    ],
    ids=range(10),
)
def test_weights_that_cannot_be_read_are_named(tmp_path, name, data, words):
    write_files(tmp_path, {name: data})
    with pytest.raises(ValueError, match=rf"^{name} ") as error:
        weight_types(tmp_path / name)
    assert re.search(words, said(error))


def test_whole_weights_are_read_without_their_data(tmp_path):
    write_files(tmp_path, {"model.safetensors": SAFE, "pytorch_model.bin": BIN})
    for name in ("model.safetensors", "pytorch_model.bin"):
        weight_types(tmp_path / name)
    assert all(tensor.is_meta for tensor in stored_values(tmp_path / "pytorch_model.bin").values())


def test_the_damaged_one_of_several_weight_files_is_named(tmp_path):
    files = checkpoint_files(1, shards=True)
    broken = sorted(name for name in files if name.endswith(".safetensors"))[1]
    write_files(tmp_path / "step1", {**files, broken: files[broken][:-10]})
    with pytest.raises(ValueError, match=f"^{broken} cannot be read"):
        load_model(
            tmp_path / "step1",
            list_checkpoints(str(tmp_path))[0].read_contents(),
            dtype=torch.float32,
        )


BAD = (b"{", b"\xff\xfe", b"[]")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_that_cannot_be_read_is_named(tmp_path, name):
    files = checkpoint_files(1, shards=True)
    contents = Contents(tuple(StoredFile(each, 1, "") for each in files if "model" in each))
    for data in BAD:
        write_files(tmp_path, {**files, name: data})
        why = rf"^{name} cannot be read: .*(JSON|Unicode|must be|object)"
        with pytest.raises(ValueError, match=why) as error:
            load_model(tmp_path, contents, dtype=torch.float32)
        said(error)


def test_code_on_the_hub_that_a_configuration_names_is_refused(tmp_path):
    for key in ("attn_implementation", "_attn_implementation", "transformers_weights"):
        for named in ("evil/kernel", {"": "evil/kernel@main:run"}):
            write_files(tmp_path, {"config.json": json.dumps({"text": {key: named}}).encode()})
            with pytest.raises(ValueError, match=f"{key} must not name "):
                load_config(tmp_path)


@pytest.mark.parametrize(
    "kind",
    ["DebertaV2", "GPTNeoXJapanese", "Luke", "Phobert", "RoCBert"],
)
def test_the_files_of_each_kind_of_tokenizer_are_known(kind):
    names = set(getattr(transformers, f"{kind}Tokenizer").vocab_files_names.values())
    assert names <= TOKENIZER_FILES
    assert (names - {"tokenizer.json"}) & VOCABULARIES


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path):
    for data in (*BAD, b"{}"):
        write_files(tmp_path, {"tokenizer.json": data})
        for path in (tmp_path / "tokenizer.json", tmp_path):
            with pytest.raises(ValueError, match=r"^tokenizer\.json cannot be read") as error:
                load_tokenizer(path)
            said(error)


@pytest.mark.parametrize("name", ["tokenizer.json", "mine.json"])
def test_a_bare_file_is_a_tokenizer(tmp_path, monkeypatch, name):
    whole = load_tokenizer(write_files(tmp_path / "whole", tokenizer_files()))
    write_files(tmp_path / "bare", {name: tokenizer_files()["tokenizer.json"]})
    monkeypatch.chdir(tmp_path)
    paths = [tmp_path / "bare" / name, Path("bare") / name]
    for path in [*paths, Path("bare")] if name == "tokenizer.json" else paths:
        assert load_tokenizer(path)(TEXT[0])["input_ids"] == whole(TEXT[0])["input_ids"]


def test_hyperparameters_may_be_paths_and_namespaces(tmp_path):
    kept = {
        "path": tmp_path / "a b",
        "inside": argparse.Namespace(path=Path("x"), rate=0.1),
        "parsed": jsonargparse.Namespace(a=1),
        "simple": SimpleNamespace(b=2),
    }
    other = {"posix": PurePosixPath("/a/b"), "windows": PureWindowsPath("c", "d")}
    torch.save({"global_step": 7, "hyper_parameters": {**kept, **other}}, tmp_path / "last.ckpt")
    loaded = stored_values(tmp_path / "last.ckpt")["hyper_parameters"]
    assert {name: loaded[name] for name in kept} == kept
    assert loaded["posix"] == Path("/a/b")
    assert loaded["windows"] == Path("c", "d")
    assert stored_step(tmp_path / "last.ckpt") == 7


@pytest.mark.parametrize("is_archive", [True, False])
def test_what_may_run_code_is_named_and_not_run(tmp_path, is_archive):
    target = tmp_path / "executed"
    value = {"global_step": 1, "hyper_parameters": argparse.Namespace(path=Payload(str(target)))}
    path = tmp_path / "last.ckpt"
    path.write_bytes(bin_file(value) if is_archive else pickle.dumps(value, protocol=2))
    with pytest.raises(
        ValueError, match=r"^last\.ckpt cannot be read: it (holds a pickled \w+\.mkdir|is damaged)"
    ) as error:
        stored_step(path)
    said(error)
    assert not target.exists()


@pytest.mark.parametrize("value", [{}, [], {"global_step": "many"}])
def test_a_lightning_file_without_a_step_is_named(tmp_path, value):
    torch.save(value, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"must say its step .* last\.ckpt does neither"):
        stored_step(tmp_path / "last.ckpt")


def test_what_is_named_is_imported_also_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "a_module_of_double.py").write_text("def double(number):\n    return 2 * number\n")
    monkeypatch.chdir(tmp_path)
    before = [*sys.path]
    monkeypatch.setattr(sys, "path", [*before])
    assert import_named("fractions.Fraction")(3) == Fraction(3)
    assert sys.path == before
    assert import_named("a_module_of_double.double")(3) == 6
    assert sys.path == [*before, str(tmp_path)]  # a library is not shadowed by a file there
