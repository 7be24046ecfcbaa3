"""``embedgeo vocabulary``, through the real client against a Hub on 127.0.0.1, and on local
folders.
"""

from functools import cache

import pandas as pd
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
)

from embedgeo import load_sample
from embedgeo.checkpoints.files import Contents, hashed_file
from embedgeo.checkpoints.sources import local_files
from embedgeo.cli import main
from embedgeo.metrics import streaming_metrics
from embedgeo.report.runs import read_runs
from embedgeo.studies.commands import VocabularySettings, vocabulary
from embedgeo.studies.vocabulary import about_centroid, read_matrices
from tests.data import floats
from tests.models import t5
from tests.sweep.conftest import hub  # noqa: F401 (a fixture)
from tests.sweep.tiny import (
    REPOSITORY,
    SIZES,
    saved_files,
    tokenizer_files,
    tokenizer_of,
    write_files,
)

ROWS, KNOWN = 320, 300
NEVER_USED = [*range(KNOWN, ROWS)]


@cache
def built(kind="gpt_neox", step=0):
    """A model of whose 320 rows the tokenizer has 300; two are equal, and one is as small as those
    no token uses.
    """
    sizes = {"vocab_size": ROWS, "max_position_embeddings": 64, **SIZES}
    gpt2 = {"vocab_size": ROWS, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    makers = {
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**gpt2)),
        "bert": lambda: BertForMaskedLM(BertConfig(**sizes)),
        "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)),
    }
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(step)
        made = makers[kind]()
        table = made.get_input_embeddings().weight
        table.normal_()
        table[unreached()] *= 0.01
        table[20] = 0.01 * torch.randn(16)
        table[31] = table[30]
        if kind == "gpt_neox":
            made.get_output_embeddings().weight.normal_(1.0)
    return made.eval()


def unreached():
    """Ids that no token has, and those of tokens for bytes that UTF-8 never has."""
    tokenizer = tokenizer_of(tokenizer_files())
    never = [chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))]
    return [*NEVER_USED, *tokenizer.convert_tokens_to_ids(never)]


def files(kind="gpt_neox", step=0, *, size="1GB", with_tokenizer=True):
    saved = saved_files(
        lambda folder: built(kind, step).save_pretrained(folder, max_shard_size=size)
    )
    return saved | (tokenizer_files() if with_tokenizer else {})


def run(model, out, **options):
    return vocabulary(VocabularySettings(str(model), out=str(out), **options))


def values(out, name, layer):
    records = pd.read_parquet(out / "checkpoints" / f"{name}.parquet")
    return records[records["layer"] == layer].set_index("metric")["value"]


def by_hand(matrix):
    metrics = streaming_metrics(matrix.shape[1], spectrum=True)
    for metric in metrics:
        metric.update(matrix)
    return {key: value for metric in metrics for key, value in floats(metric.compute()).items()}


def named(out, name, layer):
    table = pd.read_parquet(out / "vocabulary" / f"{name}.parquet")
    return table[table["layer"] == layer].set_index("token_id")


def test_both_matrices_are_measured_and_the_rows_to_be_known_are_named(tmp_path, capsys):
    model = write_files(tmp_path / "mine", files())
    assert run(model, tmp_path / "out") == 0
    said, made = capsys.readouterr().out, built()
    for layer, weight in (
        ("input_embedding", made.get_input_embeddings().weight.detach()),
        ("output_embedding", made.get_output_embeddings().weight.detach()),
    ):
        got = values(tmp_path / "out", "mine", layer)
        for key, value in by_hand(weight).items():
            assert got[key] == pytest.approx(value, rel=1e-12, nan_ok=True), key
        assert got["n"] == ROWS
        assert got["Q"] == pytest.approx(float(weight.double().square().sum(1).mean()), rel=1e-9)
        assert got["rows_without_token"] == ROWS - KNOWN
    inputs, outputs = (
        named(tmp_path / "out", "mine", f"{side}_embedding") for side in ("input", "output")
    )
    assert sorted(inputs.index[inputs["untrained"]]) == sorted({20, *unreached()})
    assert inputs["same_as"][[30, 31]].tolist() == [30, 30]
    assert (
        (inputs["same_as"] >= 0).sum()
        == values(tmp_path / "out", "mine", "input_embedding")["duplicate_rows"]
        == 2
    )
    assert sorted(inputs.index[inputs["without_token"]]) == NEVER_USED
    tokenizer = tokenizer_of(tokenizer_files())
    assert inputs["token"][20] == tokenizer.decode([20])
    # the output's rows are alike: what no token uses cannot be told from the others
    assert values(tmp_path / "out", "mine", "output_embedding").isna()["untrained_rows"]
    assert not outputs["untrained"].any()
    assert "20 without a token (300–319)" in said
    assert f"30 {tokenizer.decode([30])!r} = 31 {tokenizer.decode([31])!r}" in said
    assert "output_embedding: 320 rows of 16 measured" in said
    assert "cannot be told" in said
    heading = next(line for line in said.splitlines() if "means over layers" in line)
    assert heading.split()[3:] == ["M_over_Q", "anisotropy", "time", "left"]
    model_records = values(tmp_path / "out", "mine", "model")
    assert model_records.to_dict() == {"tied_embeddings": 0.0}


def test_norms_about_the_centroid_stand_beside_those_of_random_rows(tmp_path, capsys):
    model = write_files(tmp_path / "mine", files())
    assert run(model, tmp_path / "out") == 0
    weight = built().get_input_embeddings().weight.detach().double()
    distances = (weight - weight.mean(0)).norm(dim=1)
    got = values(tmp_path / "out", "mine", "input_embedding")
    assert got["centroid_norm_mean"] == pytest.approx(float(distances.mean()))
    spread = float(distances.std(correction=0) / distances.mean())
    assert got["centroid_norm_cv"] == pytest.approx(spread)
    table = named(tmp_path / "out", "mine", "input_embedding")
    nearest = distances.argsort()[:6].tolist()
    assert set(table.sort_values("from_centroid").head(6).index) == set(nearest)
    assert table["from_centroid"][nearest[0]] == pytest.approx(float(distances.min()))
    assert "nearest to the centroid: " in capsys.readouterr().out


@pytest.mark.parametrize("offset", [0.0, 1.0, 30.0])
def test_gaussian_rows_have_the_spread_of_norms_that_is_expected_of_them(offset):
    rows = offset + torch.randn(20000, 128, generator=torch.Generator().manual_seed(0))
    found, _ = about_centroid(rows)
    norms = rows.norm(dim=1)
    spread = float(norms.std() / norms.mean())
    assert found["norm_cv_gaussian"] == pytest.approx(spread, rel=0.03)
    assert found["centroid_norm_cv"] == pytest.approx(found["centroid_norm_cv_gaussian"], rel=0.03)


def test_of_tied_matrices_both_layers_have_the_same_numbers(tmp_path, capsys):
    for kind in ("gpt2", "bert"):
        out = tmp_path / f"out-{kind}"
        assert run(write_files(tmp_path / kind, files(kind)), out, save_samples=True) == 0
        one, other = (values(out, kind, f"{side}_embedding") for side in ("input", "output"))
        pd.testing.assert_series_equal(one, other)
        assert values(out, kind, "model")["tied_embeddings"] == 1
        assert one["untrained_rows"] == len(unreached()) + 1
        sample = load_sample(out, kind).layers["output_embedding"]
        weight = built(kind).get_input_embeddings().weight
        assert sample.rows.equal(weight[sample.row_numbers])
    assert "both matrices are one" in capsys.readouterr().out


def test_an_encoder_without_a_head_has_one_matrix(tmp_path, capsys):
    bare = saved_files(built("bert").bert.save_pretrained) | tokenizer_files()
    assert run(write_files(tmp_path / "bare", bare), tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "input_embedding: " in said
    assert "output_embedding" not in said
    assert "both matrices" not in said
    assert not len(values(tmp_path / "out", "bare", "model"))


def test_rows_are_counted_to_the_last(tmp_path, capsys):
    config = GPTNeoXConfig(vocab_size=1024, **SIZES)
    saved = saved_files(GPTNeoXForCausalLM(config).save_pretrained)
    assert run(write_files(tmp_path / "mine", saved), tmp_path / "out") == 0
    assert "input_embedding: 1,024 rows of 16 measured" in capsys.readouterr().out


@pytest.mark.slow
def test_trained_rows_alone_can_be_measured(tmp_path):
    model = write_files(tmp_path / "mine", files())
    assert run(model, tmp_path / "out", rows="trained", save_samples=True) == 0
    weight = built().get_input_embeddings().weight.detach()
    trained = torch.tensor([i for i in range(KNOWN) if i not in (20, *unreached())])
    got = values(tmp_path / "out", "mine", "input_embedding")
    for key, value in by_hand(weight[trained]).items():
        assert got[key] == pytest.approx(value, rel=1e-12, nan_ok=True), key
    sample = load_sample(tmp_path / "out", "mine").layers["input_embedding"]
    assert set(sample.row_numbers.tolist()) == set(trained.tolist())
    assert sample.rows.equal(weight[sample.row_numbers])


def test_a_run_on_the_hub_resumes_and_goes_to_tensorboard_and_the_report(hub, tmp_path):  # noqa: F811
    hub.add(REPOSITORY, "main", files(step=2))
    for name, step in {"step0": 0, "step1": 0, "step2": 2}.items():
        hub.add(REPOSITORY, name, files(step=step, with_tokenizer=False))
    out = tmp_path / "out"
    assert run(REPOSITORY, out, steps="0,1") == 0
    assert run(REPOSITORY, out, steps="0,1") == 0
    assert sum(hub.downloads("model.safetensors").values()) == 1
    pd.testing.assert_frame_equal(
        named(out, "step0", "input_embedding"), named(out, "step1", "input_embedding")
    )
    assert pd.read_parquet(out / "checkpoints" / "step1.parquet")["duplicate_of"].eq("step0").all()
    (folder,) = (out / "tensorboard").iterdir()
    tags = EventAccumulator(str(folder)).Reload().Tags()["scalars"]
    assert {"geometry.Q/input_embedding", "geometry.untrained_rows/output_embedding"} <= set(tags)
    (read,) = read_runs([out])
    assert read.layers == ["input_embedding", "output_embedding"]
    assert read.baseline["M_over_Q"].tolist() == pytest.approx([1 / ROWS] * 4)


def test_other_settings_are_refused(tmp_path, capsys):
    model = write_files(tmp_path / "mine", files())
    arguments = [
        "vocabulary",
        "--model",
        str(model),
        "--out",
        str(tmp_path / "out"),
        "--no-spectrum",
    ]
    assert main(arguments) == 0
    assert main([*arguments, "--rows", "trained"]) == 2
    assert "rows was 'all', is 'trained'" in capsys.readouterr().err
    assert main(["sweep", "--model", str(model), "--out", str(tmp_path / "out")]) == 2
    assert "was made by embedgeo vocabulary" in capsys.readouterr().err


def test_only_the_files_that_hold_the_matrices_are_fetched(hub, tmp_path):  # noqa: F811
    stored = files(size="4KB")
    hub.add(REPOSITORY, "main", stored)
    assert run(REPOSITORY, tmp_path / "out") == 0
    weights = [name for name in stored if name.endswith(".safetensors")]
    fetched = [
        what
        for (method, what, _) in hub.requests
        if method == "GET" and what.endswith(".safetensors")
    ]
    assert 0 < len(set(fetched)) < len(weights)
    for side in ("input", "output"):
        weight = getattr(built(), f"get_{side}_embeddings")().weight.detach()
        got = values(tmp_path / "out", "main", f"{side}_embedding")
        assert got["Q"] == pytest.approx(by_hand(weight)["Q"], rel=1e-12)


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2", "bert", "t5"])
def test_matrices_are_those_of_the_model_in_any_format(kind, tmp_path):
    made = t5() if kind == "t5" else built(kind)
    made.save_pretrained(tmp_path)
    for as_bin in (False, True):
        if as_bin:
            (tmp_path / "model.safetensors").unlink()
            torch.save(made.state_dict(), tmp_path / "pytorch_model.bin")
        contents = Contents(*(tuple(map(hashed_file, paths)) for paths in local_files(tmp_path)))
        read = read_matrices(tmp_path, contents, dtype=torch.float32)
        assert read.input.equal(made.get_input_embeddings().weight)
        assert read.output.equal(made.get_output_embeddings().weight)
        assert read.is_tied == (kind != "gpt_neox")
        assert read.model_class == type(made).__name__


def test_without_a_tokenizer_rows_go_by_their_numbers(tmp_path, capsys):
    model = write_files(tmp_path / "mine", files(with_tokenizer=False))
    assert run(model, tmp_path / "out") == 0
    assert "mine has no tokenizer: rows go by their numbers" in capsys.readouterr().out
    got = values(tmp_path / "out", "mine", "input_embedding")
    assert got[["untrained_rows", "rows_without_token"]].isna().all()
    noted = named(tmp_path / "out", "mine", "input_embedding")
    assert noted[noted["same_as"] >= 0].index.tolist() == [30, 31]
    assert set(noted["token"]) == {""}
