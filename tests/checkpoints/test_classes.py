"""Of which class a checkpoint is: transformers' own, one that comes with it, or none that is
known.
"""

import sys

import pytest
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModel,
    CLIPConfig,
    CLIPModel,
    CLIPTextModel,
    CLIPVisionConfig,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    dynamic_module_utils,
)

import embedgeo
from embedgeo.checkpoints.loading import described_model, load_tokenizer
from embedgeo.cli import main
from tests.sweep.conftest import (
    hub as hub,  # noqa: PLC0414  # a fixture
    options as options,  # noqa: PLC0414
    text as text,  # noqa: PLC0414
)
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import (
    REPOSITORY,
    SIZES,
    bin_file,
    changed,
    checkpoint_files,
    model,
    write_files,
)

CODE = b"""
from transformers import GPT2LMHeadModel, GPT2Model, PreTrainedTokenizerFast


class MineModel(GPT2Model):
    pass


class MineForCausalLM(GPT2LMHeadModel):
    pass


class MineTokenizer(PreTrainedTokenizerFast):
    pass
"""
OWN_CODE = b"""
from transformers import GPT2Config, GPT2LMHeadModel

from .scale import SCALE


class MineConfig(GPT2Config):
    model_type = "mine"


class MineForCausalLM(GPT2LMHeadModel):
    config_class = MineConfig
    scale = SCALE
"""
CLASSES = {
    "AutoModel": "MineModel",
    "AutoModelForCausalLM": "MineForCausalLM",
    "AutoModelForSequenceClassification": "MineForCausalLM",
}
TEXT = {**SIZES, "vocab_size": 64, "max_position_embeddings": 64}
GPT2 = checkpoint_files(1, "gpt2")
UNDECIDED = "auto_map names code that comes with the model; --trust-remote-code true runs"


@pytest.fixture
def modules(monkeypatch, tmp_path):
    """A folder of its own for the code that transformers copies before it is run."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [each for each in sys.modules if each.startswith("transformers_modules")]:
        del sys.modules[name]


def load(folder, **options):
    (checkpoint,) = embedgeo.iter_checkpoints(str(folder), **options)
    return checkpoint.load()


class Mine(GPT2LMHeadModel):
    pass


@pytest.mark.parametrize(
    "names",
    [
        None,
        [],
        ["gpt2lmheadModel"],
        ["TFGPT2LMHeadModel"],
        ["FlaxGPT2Model"],
        ["FSDPGPT2LMHeadModel"],
        ["T5WithLMHeadModel"],
    ],
)
def test_what_transformers_calls_a_class_in_any_spelling_is_known(tmp_path, names):
    write_files(tmp_path, changed(GPT2, architectures=names))
    assert type(load(tmp_path)) is GPT2LMHeadModel


def test_a_class_that_transformers_does_not_have_is_refused_unless_it_is_registered(
    tmp_path, monkeypatch
):
    write_files(tmp_path, changed(GPT2, architectures=["Mine"]))
    for trusted in (None, False, True):  # there is no code to run
        with pytest.raises(
            ValueError,
            match=r"^config\.json: architectures must name a class of transformers; got Mine\. If "
            r"this is another name of GPT2LMHeadModel, .*register_for_auto_class.* as \.pt",
        ):
            load(tmp_path, trust_remote_code=trusted)
    registered = MODEL_FOR_CAUSAL_LM_MAPPING._extra_content
    monkeypatch.setitem(registered, GPT2Config, Mine)
    assert type(load(tmp_path)) is Mine


class Rotary(LlamaModel):
    def _init_weights(self, module):
        """Fill no buffers, as classes written for earlier versions of transformers."""


def test_buffers_of_a_class_of_ones_own_are_those_that_it_makes(tmp_path, monkeypatch):
    monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING._extra_content, LlamaConfig, Rotary)
    made = Rotary(LlamaConfig(**TEXT))
    made.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path).rotary_emb.inv_freq, made.rotary_emb.inv_freq)


class Lenient(Mine):
    _keys_to_ignore_on_load_missing = (r"h\.1\.mlp\.c_fc\.bias", "wte")  # the second is a tied one


def test_no_weight_of_a_class_of_ones_own_may_be_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING._extra_content, GPT2Config, Lenient)
    weights = model(1, "gpt2").state_dict()
    files = {**GPT2, "model.safetensors": None, "pytorch_model.bin": bin_file(weights)}
    write_files(tmp_path, files)
    assert type(load(tmp_path)) is Lenient
    del weights["transformer.h.1.mlp.c_fc.bias"]
    write_files(tmp_path, {"pytorch_model.bin": bin_file(weights)})
    with pytest.raises(ValueError, match=r"missing: transformer\.h\.1\.mlp\.c_fc\.bias\. Give"):
        load(tmp_path)


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("names", "trusted_class"),
    [
        (["AutoModel", "AutoModelForCausalLM"], "MineForCausalLM"),
        (["AutoModel"], "MineModel"),
        (["AutoModelForSequenceClassification"], "MineForCausalLM"),
    ],
)
def test_of_code_beside_a_known_model_type_it_must_be_said_whether_it_is_run(
    tmp_path, capsys, names, trusted_class
):
    auto_map = {each: f"mine.{CLASSES[each]}" for each in names}
    files = changed(GPT2, architectures=[trusted_class], auto_map=auto_map)
    whole = model(1, "gpt2")
    body = whole.transformer if trusted_class == "MineModel" else whole
    weights = {"model.safetensors": None, "pytorch_model.bin": bin_file(body.state_dict())}
    files |= {**weights, "mine.py": CODE}
    write_files(tmp_path / "mine", files)
    with pytest.raises(ValueError, match=f"^config.json: {UNDECIDED}"):
        load(tmp_path / "mine")
    assert main(["doctor", str(tmp_path / "mine")]) == 2
    assert UNDECIDED in capsys.readouterr().err
    stock = load(tmp_path / "mine", trust_remote_code=False)
    assert type(stock).__module__.startswith("transformers.")
    trusted = load(tmp_path / "mine", trust_remote_code=True)
    assert type(trusted).__name__ == trusted_class
    assert main(["doctor", str(tmp_path / "mine"), "--trust-remote-code", "true"]) == 0
    assert f"model      {trusted_class}," in capsys.readouterr().out


@pytest.mark.usefixtures("modules")
def test_each_model_runs_its_own_code_and_is_no_duplicate_of_one_with_other_code(tmp_path):
    names = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    files = changed(GPT2, model_type="mine", architectures=["MineForCausalLM"], auto_map=names)
    for scale in (1, 2):
        code = {"mine.py": OWN_CODE, "scale.py": b"SCALE = %d" % scale}
        write_files(tmp_path / f"run{scale}/step1", {**files, **code})
    runs = [str(tmp_path / f"run{scale}") for scale in (1, 2)]
    found = [*embedgeo.iter_checkpoints(runs, trust_remote_code=True)]
    assert [each.duplicate_of for each in found] == [None, None]
    assert [each.load().scale for each in (*found, *found)] == [1, 2, 1, 2]


def test_code_of_a_configuration_alone_is_not_asked_about(tmp_path):
    write_files(tmp_path, changed(GPT2, auto_map={"AutoConfig": "mine.Config"}))
    assert type(load(tmp_path)) is GPT2LMHeadModel


@pytest.mark.usefixtures("modules")
def test_of_code_for_a_tokenizer_it_must_be_said_whether_it_is_run(tmp_path):
    for code in ({"AutoTokenizer": [None, "mine.MineTokenizer"]}, [None, "mine.MineTokenizer"]):
        files = changed(GPT2, "tokenizer_config.json", auto_map=code)
        write_files(tmp_path / "mine", {**files, "mine.py": CODE})
        with pytest.raises(ValueError, match=rf"^tokenizer_config\.json: {UNDECIDED}"):
            load_tokenizer(tmp_path / "mine")
        stock = load_tokenizer(tmp_path / "mine", trust_remote_code=False)
        assert type(stock).__module__.startswith("transformers.")
        trusted = load_tokenizer(tmp_path / "mine", trust_remote_code=True)
        assert type(trusted).__name__ == "MineTokenizer"


@pytest.mark.usefixtures("modules")
def test_the_code_of_a_repository_is_fetched_where_it_is_trusted(hub, options, capsys):
    tokenizer = {"auto_map": {"AutoTokenizer": [None, "mine.MineTokenizer"]}}
    files = changed(
        GPT2, architectures=["MineModel"], auto_map={"AutoModelForCausalLM": "mine.MineForCausalLM"}
    )
    files = changed(files, "tokenizer_config.json", **tokenizer) | {"mine.py": CODE}
    hub.add(REPOSITORY, "main", files)
    with pytest.raises(ValueError, match="none loads: main"):
        sweep(REPOSITORY, **options)
    assert not hub.downloads(".py")
    assert sweep(REPOSITORY, **options, trust_remote_code=True) == 0
    assert hub.downloads("mine.py")
    assert type(load(REPOSITORY, trust_remote_code=True)).__name__ == "MineForCausalLM"
    assert main(["doctor", REPOSITORY, "--trust-remote-code"]) == 0
    assert "model      MineForCausalLM," in capsys.readouterr().out


def test_what_makes_the_model_of_a_file_is_refused_beside_a_folder_or_a_repository(tmp_path, hub):
    hub.add(REPOSITORY, "main", checkpoint_files(1))
    for source in (str(write_files(tmp_path / "run", checkpoint_files(1))), REPOSITORY):
        with pytest.raises(ValueError, match=r"^model_class is for \.ckpt, \.pt and \.pth files; "):
            embedgeo.iter_checkpoints(source, model_class=Mine)


@pytest.mark.parametrize(
    "saved",
    [
        DistilBertForSequenceClassification(
            DistilBertConfig(vocab_size=64, dim=16, n_layers=1, n_heads=2, hidden_dim=32)
        ),
        GPT2ForSequenceClassification(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2)),
        GPT2Model(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2)),
    ],
)
def test_a_classifier_or_a_body_alone_is_loaded_without_a_head(tmp_path, saved):
    saved.save_pretrained(tmp_path)
    for loaded in (load(tmp_path), described_model(tmp_path)):
        assert loaded.state_dict().keys() == saved.base_model.state_dict().keys()


DECODER = {**TEXT, "head_dim": 8, "num_key_value_heads": 1}
IMAGES = {**SIZES, "image_size": 28, "patch_size": 14}
PATCHES = {"embed_dim": 16, "depth": 1, "num_heads": 2, "hidden_size": 16, "patch_size": 14}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
MANY = {
    LlavaForConditionalGeneration: LlavaConfig(
        text_config=LlamaConfig(**TEXT), vision_config=CLIPVisionConfig(**IMAGES)
    ),
    Gemma3ForConditionalGeneration: Gemma3Config(text_config=DECODER, vision_config=IMAGES),
    Qwen2VLForConditionalGeneration: Qwen2VLConfig(
        text_config={**DECODER, "rope_parameters": ROPE}, vision_config=PATCHES
    ),
    CLIPModel: CLIPConfig(text_config=TEXT, vision_config=IMAGES),
}


@pytest.mark.parametrize("kind", MANY)
def test_a_model_of_more_than_text_is_refused_and_its_text_model_is_taken(tmp_path, kind):
    config = MANY[kind]
    kind(config).save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match=f"must be of text alone; {config.model_type} is of more"):
        load(tmp_path / "whole")
    of_text = CLIPTextModel if kind is CLIPModel else AutoModel
    inner = of_text.from_pretrained(tmp_path / "whole")
    getattr(inner, "language_model", inner).save_pretrained(tmp_path / "text")
    loaded = load(tmp_path / "text")
    with embedgeo.observe(loaded) as geometry, torch.no_grad():
        loaded(input_ids=torch.arange(12).view(1, -1))
    assert "block.01" in geometry.compute()
