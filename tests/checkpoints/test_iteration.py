"""Checkpoints in a loop: what is yielded and loaded."""

import hashlib
import json
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load, save
from transformers import AlbertConfig
from transformers.models.albert import modeling_albert

import embedgeo
from embedgeo.checkpoints.loading import empty_model
from tests.sweep.conftest import hub as hub  # noqa: PLC0414  # a fixture
from tests.sweep.tiny import (
    REPOSITORY,
    bin_file,
    changed,
    checkpoint_files,
    local_run,
    model,
    write_files,
)

IDS = torch.arange(12).view(1, -1)


def only(folder, **options):
    (checkpoint,) = embedgeo.iter_checkpoints(str(folder), **options)
    return checkpoint


def logits(loaded):
    with torch.no_grad():
        return loaded(IDS).logits


def test_checkpoints_of_a_repository_are_loaded(hub):
    commits = [
        hub.add(REPOSITORY, f"step{step}", checkpoint_files(0 if step == 1 else step))
        for step in (0, 1, 2, 16)
    ]
    seen = []
    for checkpoint in embedgeo.iter_checkpoints(REPOSITORY, steps="0,1,2"):
        assert torch.equal(logits(checkpoint.load()), logits(model(2 * (checkpoint.step == 2))))
        seen.append((checkpoint.name, checkpoint.commit, checkpoint.duplicate_of))
    assert seen == [
        ("step0", commits[0], None),
        ("step1", commits[1], "step0"),
        ("step2", commits[2], None),
    ]


def test_a_branch_that_moves_meanwhile_is_loaded_as_it_was(hub):
    hub.add(REPOSITORY, "step1", checkpoint_files(1))
    (checkpoint,) = embedgeo.iter_checkpoints(REPOSITORY)
    hub.repositories[REPOSITORY]["branches"]["step1"] = "1a2b" * 10
    hub.commits["1a2b" * 10] = checkpoint_files(3)
    assert torch.equal(logits(checkpoint.load()), logits(model(1)))


def test_local_weights_are_hashed_when_they_are_loaded_and_known_to_be_duplicates_before(tmp_path):
    local_run(tmp_path, steps=(1, 2))
    write_files(tmp_path / "step4", checkpoint_files(2))
    checkpoints = embedgeo.iter_checkpoints(str(tmp_path))
    assert [each.duplicate_of for each in checkpoints] == [None, None, "step2"]
    local_run(tmp_path, steps=(1, 8))
    checkpoints = embedgeo.iter_checkpoints(str(tmp_path))
    next(checkpoints)
    data = checkpoint_files(3)["model.safetensors"]
    write_files(tmp_path / "step8", {"model.safetensors": data})
    *_, last = checkpoints
    assert last.weights_sha256 == hashlib.sha256(data).hexdigest()


class Tiny(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("turns", torch.tensor([1j]), persistent=False)


def test_local_folders_and_files(tmp_path):
    local_run(tmp_path / "run", steps=(8, 1))
    steps = []
    for checkpoint in embedgeo.iter_checkpoints(str(tmp_path / "run")):
        loaded = checkpoint.load(dtype=torch.bfloat16, device="cpu")
        assert (loaded.dtype, loaded.training) == (torch.bfloat16, False)
        assert len(checkpoint.weights_sha256) == 64
        steps.append(checkpoint.step)
    assert steps == [1, 8]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step1", "step8"]
    saved = Tiny()
    states = {"step5.pt": bin_file(saved.state_dict()), "config.json": b"{}"}
    write_files(tmp_path / "states", states)
    with pytest.raises(ValueError, match=r"model_class must name .*step5\.pt"):
        embedgeo.iter_checkpoints(str(tmp_path / "states"))
    for model_class in (Tiny, f"{__name__}:Tiny"):
        checkpoint = only(tmp_path / "states", model_class=model_class)
        loaded = checkpoint.load(dtype=torch.bfloat16)
        assert torch.equal(loaded.weight, saved.weight.bfloat16())
        assert loaded.turns == 1j


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (
            {"model": Tiny().state_dict(), "ema": Tiny().state_dict()},
            "several: model, ema",
        ),
        (
            {f"{at}.{k}": v for at in "ab" for k, v in Tiny().state_dict().items()},
            r": a\., b\.",
        ),
        ({k: v.char() for k, v in Tiny().state_dict().items()}, "16 bits or more; got weight of"),
        (
            {**Tiny().state_dict(), "more": {"ema": Tiny().state_dict()}},
            ": itself, more ema",
        ),
    ],
)
def test_one_model_as_it_is_stored_is_taken_from_a_file(tmp_path, stored, reason):
    write_files(tmp_path, {"step5.pt": bin_file(stored)})
    checkpoint = only(tmp_path, model_class=Tiny)
    with pytest.raises(ValueError, match=reason):
        checkpoint.load()


class Narrow(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))


class Tied(torch.nn.Sequential):
    def __init__(self):
        super().__init__(Tiny(), Tiny())
        self[1].weight = self[0].weight


def test_averages_are_not_taken_for_a_model_with_other_names(tmp_path):
    saved = Tied().state_dict()  # of which a part was compiled
    compiled = {key.replace("1.", "1._orig_mod."): value for key, value in saved.items()}
    write_files(tmp_path, {"step5.pt": bin_file({"model": compiled, "ema": saved})})
    checkpoint = only(tmp_path, model_class=Tied)
    with pytest.raises(ValueError, match="one model; it holds several: ema, model"):
        checkpoint.load()


def test_two_values_of_one_parameter_are_refused_and_nan_is_one(tmp_path):
    saved = Tied().state_dict()
    saved["1.weight"][0] = torch.nan
    write_files(tmp_path, {"step5.pt": bin_file({**saved, "0.weight": saved["1.weight"].clone()})})
    checkpoint = only(tmp_path, model_class=Tied)
    assert checkpoint.load()[1].weight.isnan().sum() == 3
    write_files(tmp_path, {"step5.pt": bin_file({**saved, "0.weight": -saved["1.weight"]})})
    with pytest.raises(
        ValueError, match=r"step5\.pt must have one .*; 0\.weight and 1\.weight dif"
    ):
        checkpoint.load()


@pytest.mark.parametrize("name", ["step5.pt", "step5.ckpt"])
def test_a_class_that_rounds_the_weights_of_its_file_is_refused(tmp_path, name):
    for value in (torch.ones(3, dtype=torch.bfloat16), torch.ones(3)):
        stored = {"state_dict": {"weight": value}, "pytorch-lightning_version": "2.6"}
        checkpoint = only(write_files(tmp_path, {name: bin_file(stored)}), model_class=Narrow)
        checkpoint.load(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"makes weight in .*bfloat16\. Let .* in torch\.float32"):
        checkpoint.load()


def test_what_cannot_be_loaded_is_refused(tmp_path, hub):
    with pytest.raises(FileNotFoundError, match="lab/nothing must be a local path"):
        embedgeo.iter_checkpoints("lab/nothing")
    local_run(tmp_path, steps=(1,))
    (tmp_path / "step1" / "config.json").unlink()
    checkpoint = only(tmp_path)
    with pytest.raises(ValueError, match=r"step1 cannot be read: .* must have a config\.json"):
        checkpoint.load()


def weights_with(more, kind="gpt_neox", cast=None, without=None):
    weights = load(checkpoint_files(1, kind)["model.safetensors"])
    weights.pop(without, None)
    if cast:
        weights = {k: v.to(cast) if v.ndim == 2 else v for k, v in weights.items()}
    return {"model.safetensors": save(weights | {name: torch.ones(1) for name in more})}


def test_a_model_saved_without_the_head_that_its_configuration_names_is_loaded(tmp_path):
    weights = load(checkpoint_files(1)["model.safetensors"])
    body = {k.removeprefix("gpt_neox."): v for k, v in weights.items() if "gpt_neox." in k}
    write_files(tmp_path, {**checkpoint_files(1), "model.safetensors": save(body)})
    checkpoint = only(tmp_path)
    assert checkpoint.load().state_dict().keys() == body.keys()


config_with = partial(changed, checkpoint_files(1))


def weights_in_two_files():
    names = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]
    index = {"weight_map": dict(zip("ab", names, strict=True))}
    data = dict.fromkeys(names, checkpoint_files(1)["model.safetensors"])
    index_file = {"model.safetensors.index.json": json.dumps(index).encode()}
    return {"model.safetensors": None, **data, **index_file}


ENDLESS = {"num_hidden_layers": 10**12}


def weights_of_a_wrapper():
    weights = load(checkpoint_files(1)["model.safetensors"])
    return {"model.safetensors": save({f"_orig_mod.{k}": v for k, v in weights.items()})}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (config_with(num_hidden_layers=10**12), "num_hidden_layers must be at most"),
        (config_with(text_config=ENDLESS), "num_hidden_layers must be at most"),
        (config_with(hidden_size=10**7), "must fit the weights"),
        (config_with(vocab_size=10**12), "must fit the weights"),
        (config_with(hidden_size=10**30), "config.json"),
        (weights_in_two_files(), r"in one file; model-2-of-2\.safetensors holds .* again"),
        (weights_of_a_wrapper(), "Its keys have '_orig_mod.', as the state dict of a"),
        (config_with(num_hidden_layers=1), r"not the model's: gpt_neox\.layers\.1\."),
        (config_with(intermediate_size=48), r"of another shape: .* \[16, 32\], for \[16, 48\]"),
        (weights_with(["gpt_neox.layers.0.mlp.dense.weight_scale"]), "the model's: .*weight_scale"),
        (weights_with([], cast=torch.float8_e4m3fn), "of 16 bits or more, .* of F8_E4M3"),
        (weights_with([], cast=torch.int64), "of 16 bits or more, .* of I64"),
        (
            config_with(quantization_config={"quant_method": "fp8"})
            | weights_with([], cast=torch.float8_e4m3fn),
            "without a scale: gpt_neox",
        ),
        (config_with(quantization_config={"quant_method": "modelopt"}), "got .*modelopt"),
        (weights_with(["layers.0.mlp.dense_h_to_4h.bias"]), r"twice: gpt_neox\.layers"),
        ({"adapter_config.json": b"{}"}, r"found adapter_config\.json\. .*merge_and_unload"),
        (
            {"model.safetensors": None, "m.gguf": b""},
            r"must have weights.* m\.gguf: take the model",
        ),
        ({"model.safetensors": None, "zero_to_fp32.py": b""}, "by this script of DeepSpeed"),
        (weights_with([], without="embed_out.weight"), r"missing: lm_head\.weight"),
        ({"model.safetensors": None, "__0_0.distcp": b""}, "distcp: save the weights in one file"),
    ],
)
def test_what_the_model_does_not_take_as_it_is_stored_is_refused(tmp_path, changes, reason):
    write_files(tmp_path / "step1", {**checkpoint_files(1), **changes})
    checkpoint = only(tmp_path)
    with pytest.raises(ValueError, match=reason):
        checkpoint.load()


def test_masks_and_heads_of_other_tasks_may_be_beside_the_weights(tmp_path):
    more = ["bert.embeddings.position_ids", "bert.pooler.dense.weight", "cls.seq_relationship.bias"]
    write_files(tmp_path / "step1", {**checkpoint_files(1, "bert"), **weights_with(more, "bert")})
    checkpoint = only(tmp_path)
    assert torch.equal(logits(checkpoint.load()), logits(model(1, "bert")))


class WithManyParameters(torch.nn.Module):
    """A layer that is made as fast as others that have a hundredth of its parameters."""

    def __init__(self, config):
        super().__init__()
        parameter = torch.nn.Parameter(torch.empty(0))
        for i in range(100_000):
            self.register_parameter(str(i), parameter)


@pytest.mark.slow
def test_a_model_without_end_is_refused_while_it_is_made(monkeypatch):
    monkeypatch.setattr(modeling_albert, "AlbertLayer", WithManyParameters)
    config = AlbertConfig(inner_group_num=10**12, hidden_size=8, num_attention_heads=2)
    with pytest.raises(ValueError, match="must describe at most 200000 parameters"):
        empty_model(config)
