"""Text from datasets on the Hub, by the real library and a Hub on this machine."""

import json

import pytest
from huggingface_hub import HfFileSystem

from embedgeo.text import Documents
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import TEXT, local_run

NUM_ROWS = 1000
ROWS = [
    {"text": f"{text} {i}", "n": i, "title": None if i == 1 else f"T{i}"}
    for i, text in enumerate(TEXT * NUM_ROWS)
]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def web(datasets_hub):
    """Two datasets on the Hub: ``lab/web``, with two splits, and ``lab/several``, with two
    configurations.
    """
    hub = datasets_hub
    hub.add("datasets/lab/web", "main", {"train.jsonl": lines(ROWS), "test.jsonl": lines(ROWS[:2])})
    card = (
        "configs:\n- {config_name: en, data_files: a.jsonl}\n"
        "- {config_name: de, data_files: b.jsonl}"
    )
    files = {
        "README.md": f"---\n{card}\n---\n".encode(),
        "a.jsonl": lines(ROWS[:1]),
        "b.jsonl": lines(ROWS[1:2]),
    }
    hub.add("datasets/lab/several", "main", files)
    return hub


def test_a_configuration_a_split_and_a_column_are_told_apart(web):
    for address, expected in {
        "lab/web:test": [row["text"] for row in ROWS[:2]],
        "lab/web:test#title": ["T0"],
        "lab/several/de": [ROWS[1]["text"]],
    }.items():
        documents = Documents([f"hf://datasets/{address}"])
        assert list(documents) == list(documents) == expected


@pytest.mark.usefixtures("reader")
def test_a_dataset_is_read_as_far_as_it_is_needed_and_no_further(
    web, options, tmp_path, monkeypatch
):
    local_run(tmp_path / "run", (1,))
    read = []
    first = Documents.__iter__
    monkeypatch.setattr(
        Documents, "__iter__", lambda self: (read.append(text) or text for text in first(self))
    )
    sweep(tmp_path / "run", **{**options, "text": "hf://datasets/lab/web"}, unit="document")
    assert read == [row["text"] for row in ROWS[:4]]  # cut to 16 tokens each, 64 are needed


@pytest.mark.usefixtures("reader")
def test_a_sweep_over_a_dataset_goes_on_unless_its_text_has_changed(
    web, options, tmp_path, monkeypatch
):
    local_run(tmp_path / "run", (1,))
    on_web = {**options, "text": "hf://datasets/lab/web", "special_tokens": "none"}
    assert sweep(tmp_path / "run", **on_web) == 0
    manifest = json.loads((options["out"] / "manifest.json").read_text())
    local_run(tmp_path / "run", (1, 2))
    assert sweep(tmp_path / "run", **on_web) == 0
    assert json.loads((options["out"] / "manifest.json").read_text()) == manifest
    changed = [{**row, "text": row["text"].replace("dog", "cat")} for row in ROWS]
    web.add("datasets/lab/web", "main", {"train.jsonl": lines(changed)})
    HfFileSystem.clear_instance_cache()
    local_run(tmp_path / "run", (1, 2, 4))
    with pytest.raises(ValueError, match="on one text; the dataset no longer gives that of"):
        sweep(tmp_path / "run", **on_web)
    with pytest.raises(ValueError, match="text_sha256 was"):
        sweep(tmp_path / "run", **{**on_web, "text": "hf://datasets/lab/web:test"})


def test_what_is_not_there_is_named_in_a_line(web):
    for address, rule in (
        ("lab/none", r"lab/none cannot be read \(RepositoryNotFoundError"),
        ("lab/web:dev", "lab/web:dev cannot be read .*dev"),
        ("lab/several/fr", "lab/several/fr cannot be read .*fr"),
        ("lab/web#body", r"must have a column 'body'; it has text, n,? .*title"),
        ("lab/web#n", "column 'n' of hf://datasets/lab/web#n must hold strings; it holds int"),
        *((name, "NAME is author/name") for name in ("none", "a/b/c/d", "lab/web:")),
    ):
        with pytest.raises(ValueError, match=rule) as raised:
            list(Documents([f"hf://datasets/{address}"]))
        assert "\n" not in str(raised.value)


def test_a_folder_of_the_name_of_a_dataset_is_not_read_in_its_place(web, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab/web").mkdir(parents=True)
    (tmp_path / "lab/web/train.jsonl").write_bytes(lines(ROWS[:1]))
    with pytest.raises(
        ValueError, match=r"lab/web would be read in its place\. Start the sweep in another folder"
    ):
        list(Documents(["hf://datasets/lab/web"]))


def test_files_and_datasets_are_read_in_order_and_a_file_changes_the_hash(web, tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    given = [str(tmp_path / "a.txt"), "hf://datasets/lab/several/en", str(tmp_path / "b.txt")]
    documents = Documents(given)
    assert list(documents) == ["one", ROWS[0]["text"], "two"]
    assert Documents(given).sha256 == documents.sha256
    (tmp_path / "b.txt").write_text("three")
    assert Documents(given).sha256 != documents.sha256
