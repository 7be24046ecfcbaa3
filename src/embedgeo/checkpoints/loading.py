"""Load models and tokenizers, without running code that comes with a checkpoint."""

import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.quantizers.auto import AutoHfQuantizer

from embedgeo.capture.structure import library, measured_model
from embedgeo.checkpoints.files import (
    UNUSED,
    Contents,
    harmless_allowed,
    nested,
    quantized,
    reading,
    require_whole_index,
    stored_values,
    weight_files,
    weight_types,
)
from embedgeo.formatting import listed, reason
from embedgeo.random_states import kept_random_states

_LAYERS = re.compile(r"layers?$|blocks?$|depth|stages?$|layers_|blocks_")
_OTHER_HEADS = re.compile("Classification|QuestionAnswering|MultipleChoice|RewardModel")
# a configuration expands their number into lists before there is a model to compare with the files
_MOST_LAYERS = 1000
# each costs memory even without data, and some counts of modules are not called layers
_MOST_TENSORS = 200_000
DeviceMap = str | Mapping[str, Any]
"""``"auto"``, or devices by names of modules, as accelerate takes them; ``"disk"``: read when it is
needed.
"""
ModelClass = str | Callable[..., nn.Module]
"""A LightningModule, or what makes a model without arguments; or its name."""

_CODE = (
    "auto_map names code that comes with the model; --trust-remote-code true runs this code, false "
    "takes transformers' own class, if there is one"
)
_PREFIXES = "_orig_mod.", "_fsdp_wrapped_module.", "module."  # of wrappers, in keys


def load_config(folder: Path, *, trust_remote_code: bool | None = None) -> PreTrainedConfig:
    """The configuration of the model in a folder. Whether to run code that it names for the model
    must be said.
    """

    def require_harmless(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, value in pairs:
            if key.endswith("_implementation") and "/" in str(value) and not trust_remote_code:
                raise ValueError(
                    f"config.json: {key} must not name code on the Hub; got {value!r}. "
                    f"--trust-remote-code allows it."
                )
            if key == "transformers_weights":
                raise ValueError(
                    f"config.json: {key} must not name a file; got {value!r}. Rename that to "
                    "model.safetensors, and take the key out."
                )
            if isinstance(value, int) and value > _MOST_LAYERS and _LAYERS.search(key):
                raise ValueError(f"config.json: {key} must be at most {_MOST_LAYERS}; got {value}.")
        return dict(pairs)

    json.loads(_read_object(folder / "config.json"), object_pairs_hook=require_harmless)
    with _explaining(folder / "config.json"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=bool(trust_remote_code)
        )
    if trust_remote_code is None and _code(config):
        raise ValueError(f"config.json: {_CODE}.")
    return config


def _code(config: Any) -> list[str]:
    """The auto classes that have code which comes with the model."""
    return [
        name for name in getattr(config, "auto_map", None) or () if name.startswith("AutoModel")
    ]


def _read_object(path: Path) -> bytes:
    """The content of a JSON file, which must be an object."""
    with reading(path.name):
        content = path.read_bytes()
        if not isinstance(json.loads(content), dict):
            raise TypeError("it must be an object")
    return content


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Raise a ValueError of one sentence that names a configuration, and our option, in place of an
    error of transformers.
    """
    try:
        yield
    except Exception as error:
        message = " ".join(str(error).split())
        if message.startswith(path.name):
            raise
        first = re.split(r"(?<=\w[.!]) ", message[:300], maxsplit=1)[0].rstrip(".")
        why = f"transformers cannot take it ({type(error).__name__}: {first})"
        if "trust_remote_code" in message:
            why = _CODE
        raise ValueError(f"{path.name}: {why}.") from error


def is_encoder(config: PreTrainedConfig) -> bool:
    """Tell the configuration of a model whose positions see those after them: one that predicts
    masked tokens, the encoder of two sides by itself, or a decoder that is told to.
    """
    is_part = (
        type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING and not config.is_encoder_decoder
    )
    return (
        getattr(config, "use_bidirectional_attention", None) in (True, "all")
        or getattr(config, "is_causal", None) is False
        or (
            (_has_masked_head(config) or is_part)
            and not _names_causal_head(config)
            and not (getattr(config, "is_decoder", False) or getattr(config, "causal", False))
        )
    )


def _has_masked_head(config: PreTrainedConfig) -> bool:
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING or "AutoModelForMaskedLM" in _code(config)


def has_causal_head(config: Any) -> bool:
    """Tell the configuration of a model of which transformers knows one that predicts next tokens,
    or which comes with the code of one.
    """
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in _code(config)


def _names_causal_head(config: PreTrainedConfig) -> bool:
    # XLMWithLMHeadModel and FlaubertWithLMHeadModel predict masked tokens
    return any(
        re.search("CausalLM$|(?<!With)LMHeadModel$", name) for name in config.architectures or ()
    )


def _without_other_head(model: Any, keys: Iterable[str] = ()) -> nn.Module:
    """The model, or its body where the configuration names another head or none, and no keys are
    those of a model with one: the head may be the embedding, and was not trained.
    """
    named = model.config.architectures or ()
    body: nn.Module = model.base_model
    is_whole = any(key.startswith(f"{model.base_model_prefix}.") for key in keys)
    is_bare = type(body).__name__ in named and not is_whole
    return body if is_bare or any(map(_OTHER_HEADS.search, named)) else model


def is_encoder_model(model: nn.Module) -> bool:
    """Tell a model whose positions see those after them from one that predicts the next token."""
    config = getattr(measured_model(model), "config", None)
    return isinstance(config, PreTrainedConfig) and is_encoder(config)


def empty_model(config: PreTrainedConfig, *, trust_remote_code: bool | None = None) -> Any:
    """The model of a configuration, without memory for its weights, if it has no more than any real
    model.
    """
    num_tensors = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal num_tensors
        num_tensors += 1
        if num_tensors > _MOST_TENSORS:
            raise ValueError(
                f"config.json must describe at most {_MOST_TENSORS} parameters; it describes more."
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        with torch.device("meta"):
            # in the dtype that torch has already: another one would be set for all threads
            dtype = torch.get_default_dtype()
            model = _auto_class(config, trust_remote_code).from_config(
                config, dtype=dtype, trust_remote_code=bool(trust_remote_code)
            )
    finally:
        hook.remove()
    if not _code(config):  # else it was said which class to take
        _require_known_class(model)
    return model


def _require_known_class(model: nn.Module) -> None:
    """Check that a configuration names a class of transformers, or one that was registered."""
    config: Any = model.config
    own = {type(module).__name__ for module in model.modules()}
    for name in {*(config.architectures or ())} - own:
        # what T5's files name was a class of transformers once
        known = {each.casefold() for each in (*dir(transformers), "T5WithLMHeadModel")}
        if re.sub("^(tf|flax|fsdp)", "", name.casefold()) not in known:
            raise ValueError(
                f"config.json: architectures must name a class of transformers; got {name}. If "
                f"this is another name of {type(model).__name__}, write that. If it is a class of "
                "your own, save it with its code (register_for_auto_class) and give "
                "--trust-remote-code true; or its state dict as .pt, and --model-class."
            )


def require_text(config: PreTrainedConfig) -> None:
    """Check that a model is of text alone."""
    if not config.is_encoder_decoder and config.get_text_config() is not config:
        raise ValueError(
            f"a model must be of text alone; {config.model_type} is of more. Save its text model "
            "with the tokenizer (AutoModel.from_pretrained(…).language_model, CLIPTextModel), or "
            "measure it by hand: embedgeo.observe."
        )


def described_model(folder: Path, *, trust_remote_code: bool | None = None) -> nn.Module:
    """The model that the configuration in a folder describes, an encoder and decoder, too; without
    memory for it, and without a head where it was saved so.
    """
    config = load_config(folder, trust_remote_code=trust_remote_code)
    with _explaining(folder / "config.json"):
        model = empty_model(config, trust_remote_code=trust_remote_code)
    return _without_other_head(model)


def _auto_class(config: PreTrainedConfig, trust_remote_code: bool | None) -> Any:
    """The class that makes a model: of those with trusted code, if there are any."""
    name = _usual_auto_class(config)
    code = _code(config) if trust_remote_code else []
    if code and name not in code:
        name = "AutoModel" if "AutoModel" in code else code[0]
    auto: Any = getattr(transformers, name)
    registered = auto._model_mapping._extra_content  # noqa: SLF001
    # transformers takes it for all models of a configuration, whatever code they have
    if getattr(registered.get(type(config)), "__module__", "").startswith("transformers_modules."):
        del registered[type(config)]
    return auto


def _usual_auto_class(config: PreTrainedConfig) -> str:
    if config.is_encoder_decoder:
        if type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
            return "AutoModelForSeq2SeqLM"
        return "AutoModel"
    if (is_other := is_encoder(config)) and _has_masked_head(config):
        return "AutoModelForMaskedLM"
    if (not is_other or _names_causal_head(config)) and has_causal_head(config):
        return "AutoModelForCausalLM"
    if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING:  # as T5's encoder, saved by itself
        return "AutoModelForTextEncoding"
    return "AutoModel"


def load_model(
    folder: Path,
    contents: Contents,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool | None = None,
    device_map: DeviceMap | None = None,
    offload_folder: Path | None = None,
) -> nn.Module:
    """Load a Hugging Face checkpoint in evaluation mode: only weights, and code that comes with it
    only if trusted. A head that the checkpoint lacks is left out, unless the configuration names
    it and other keys are those of a model with a head; other weights, neither more nor fewer, are
    those of the model, in formats whose numbers are the weights.

    Weights whose dtype is the one asked for are not copied into memory but mapped from the files,
    which must stay. Others that a device map puts on disk go into the ``offload_folder``.
    """
    require_whole_index(folder, contents.weights)
    types: dict[str, str] = {}
    for file in weight_files(contents.weights):
        held = weight_types(folder / file.name)
        if several := sorted(types.keys() & held):
            raise ValueError(
                f"each weight must be in one file; {file.name} holds {listed(several, 2)} again. "
                "Save the model anew."
            )
        types |= held
    config = load_config(folder, trust_remote_code=trust_remote_code)
    require_text(config)
    with _explaining(folder / "config.json"):
        empty = empty_model(config, trust_remote_code=trust_remote_code)
    _require_described(empty, config, contents, types)
    model, info = _auto_class(config, trust_remote_code).from_pretrained(
        folder,
        config=config,
        dtype=dtype or torch.float32,
        device_map=device_map,
        offload_folder=offload_folder,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        trust_remote_code=bool(trust_remote_code),
        use_safetensors=".safetensors" in contents.weights[0].name,
        weights_only=True,
    )
    _require_all_weights(model, info, types)
    _fill_buffers(model)
    model.config.use_cache = False  # nothing is generated
    if info["missing_keys"]:  # of a head that has random weights
        model = model.base_model
    return _without_other_head(model, types).eval()


def _fill_buffers(model: Any) -> None:
    """Make the buffers that no file has as a class of others than transformers makes them: such a
    class need not fill them when weights are loaded, and they hold what is in memory.
    """
    buffers = dict(model.named_buffers())
    unknown = buffers.keys() - model.state_dict().keys()
    if unknown and library(model) != "transformers":
        with kept_random_states():
            own = dict(type(model)(model.config).named_buffers())
        for name in unknown:
            buffers[name].copy_(own[name])


def _require_described(
    empty: nn.Module, config: PreTrainedConfig, contents: Contents, types: Mapping[str, str]
) -> None:
    """Check that a configuration describes no more than the weights can hold, and their numbers."""
    described = sum(t.numel() for t in (*empty.parameters(), *empty.buffers()))
    num_bytes = sum(file.size for file in weight_files(contents.weights))
    # a weight takes half a byte or more; some are tied, or of a head that is not there
    if described > 4 * num_bytes:
        raise ValueError(
            f"config.json must fit the weights; it describes {described:.3g} numbers, the files "
            f"hold {num_bytes} bytes."
        )
    announced = getattr(config, "quantization_config", None)
    if (announced and not AutoHfQuantizer.supports_quant_method(announced)) or (
        not announced and (announced := quantized(types, empty))
    ):
        raise ValueError(
            "weights must be of 16 bits or more, or quantized in a way that transformers reads; "
            f"got {announced}. Dequantize them."
        )


def _require_all_weights(model: Any, info: Mapping[str, Any], types: Mapping[str, str]) -> None:
    """Check that a checkpoint holds the weights of the loaded model, and no others."""
    body = f"{model.base_model_prefix}."
    # a model without a head, saved by itself, may keep the name of one in its configuration
    is_whole = model.base_model is model or (
        type(model).__name__ in (model.config.architectures or ())
        and any(key.startswith(body) for key in types)
    )
    missing = {*info["missing_keys"]}
    if library(model) != "transformers":  # which says what may be missing
        lenient = "|".join(getattr(model, "_keys_to_ignore_on_load_missing", None) or ["$^"])
        state = model.state_dict()
        tied = {state[key].data_ptr() for key in state.keys() & types.keys()}
        missing |= {
            key
            for key in state.keys() - types.keys()
            if re.search(lenient, key) and state[key].data_ptr() not in tied
        }
    wrong = {
        "missing": [key for key in sorted(missing) if is_whole or key.startswith(body)],
        "twice": sorted(k for k in types if k.startswith(body) and k.removeprefix(body) in types),
        "without a scale": [
            name
            for name, module in model.named_modules()
            if type(module) is nn.Linear and module.weight.element_size() < 2
        ],
        "not the model's": sorted(k for k in info["unexpected_keys"] if not UNUSED.search(k)),
        "of another shape": [
            f"{name} {[*stored]}, for {[*wanted]}"
            for name, stored, wanted in sorted(info["mismatched_keys"])
        ],
    }
    if any(wrong.values()):
        named = "; ".join(f"{what}: {listed(keys, 2)}" for what, keys in wrong.items() if keys)
        wrapper = next((each for each in _PREFIXES if each in named), "")
        remedy = (
            f"Its keys have {wrapper!r}, as the state dict of a wrapper has (torch.compile, DDP, "
            "FSDP): save that of the model inside, or take this out of the keys."
            if wrapper
            else "Give the config.json that these weights were saved with; quantized ones, "
            "dequantize; save no others beside them."
        )
        raise ValueError(
            f"a checkpoint must hold all weights of the model, and no others; {named}. {remedy}"
        )


def load_tokenizer(path: Path, *, trust_remote_code: bool | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, or in a file as ``tokenizer.json``."""
    tokenizer: PreTrainedTokenizerBase
    file = path if path.is_file() else path / "tokenizer.json"
    if file.is_file():
        with reading(file.name):
            parsed = Tokenizer.from_file(str(file))
    if file == path:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=parsed)
    else:
        config = path / "tokenizer_config.json"
        if config.is_file():
            code = json.loads(_read_object(config)).get("auto_map") or {}
            # a list is of an earlier format, in which it is the tokenizer's
            if trust_remote_code is None and (isinstance(code, list) or "AutoTokenizer" in code):
                raise ValueError(f"{config.name}: {_CODE}.")
        with _explaining(config):
            tokenizer = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=bool(trust_remote_code)
            )
    # documents are cut into sequences afterwards: no warning about their length
    tokenizer.model_max_length = 10**12
    return tokenizer


def load_file(
    path: Path, model_class: ModelClass, *, dtype: torch.dtype | None = None
) -> nn.Module:
    """Load a checkpoint of Lightning, or a state dict of the model that ``model_class`` makes, in
    evaluation mode.
    """
    maker = import_maker(model_class)
    is_lightning = path.suffix == ".ckpt" and hasattr(maker, "load_from_checkpoint")
    stored = stored_values(path, "cpu")
    if is_lightning:
        if not isinstance(stored, dict) or "state_dict" not in stored:
            raise ValueError(
                f"a .ckpt must be what Lightning saves, with a state_dict; {path.name} has none. "
                "Save it by trainer.save_checkpoint, a state dict as .pt, or a Hugging Face model "
                "as a folder by its save_pretrained."
            )
        with harmless_allowed():  # it names by a warning what strict_loading=False lets pass
            model: Any = maker.load_from_checkpoint(path, map_location="cpu", weights_only=True)
        _require_hyperparameters(model, stored, path.name)
    else:
        model = make_model(maker, model_class)
    weights = _weights_of(model, stored, path.name)
    if is_lightning:  # whose keys a hook of the module may change
        weights = stored["state_dict"]
    if kind := quantized({k: str(getattr(v, "dtype", "")) for k, v in weights.items()}, model):
        raise ValueError(f"weights must be of 16 bits or more; got {kind}. Dequantize them.")
    held = model.state_dict().keys()
    different = sorted(weights.keys() ^ held)
    lacking = held - weights.keys()
    try:
        if not is_lightning:
            # of a class's own load_state_dict, which may be lenient
            lacking = getattr(model.load_state_dict(weights), "missing_keys", lacking)
        elif not model.strict_loading:
            lacking = lacking if lacking == held else set()
        elif type(model).load_state_dict is nn.Module.load_state_dict:
            lacking = set()  # a hook may have changed the keys
        if lacking:
            raise RuntimeError
    except RuntimeError as error:
        raise ValueError(
            f"{path.name} must hold the weights of the model that {model_class} makes; "
            f"{listed(different, 4) or reason(error)} "
            f"{'are in one of them alone' if different else ''}."
        ) from error
    wanted = dtype or torch.float32
    _require_as_stored(model, weights, path.name, wanted)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():  # Module.to keeps the real part alone of complex ones
            tensor.data = tensor.data.to(wanted)
    loaded: nn.Module = model.eval()
    return loaded


def _require_hyperparameters(model: Any, stored: Mapping[str, Any], name: str) -> None:
    """Check that a LightningModule is of the class that its file names, and has the hyperparameters
    there, as arguments or by itself; warn of arguments that the file does not have.
    """
    made = type(model)
    arguments = signature(made)
    remedy = "name what makes it with these: --model-class package.module:make."
    saved = dict(stored.get("hyper_parameters", {}))
    known = {*saved, stored.get("hparams_name")}
    taken = dict[str, Parameter]()
    for each in made.__mro__:  # which may give others on
        own = signature(each.__init__)  # type: ignore[misc]
        taken = {**own.parameters, **taken}
        if "**" not in str(own):
            break
    defaults = [
        str(parameter)
        for name, parameter in taken.items()
        if name not in known and parameter.default is not Parameter.empty
    ]
    if defaults or (arguments.parameters and not saved):
        warnings.warn(
            f"{made.__name__} is made by its defaults, {listed(defaults or [arguments])}: they are "
            "not among the hyperparameters in its file, where save_hyperparameters() puts them. If "
            f"it was trained with others, {remedy}",
            stacklevel=3,
        )
    saved.pop("_instantiator", None)
    module, _, own = (named := saved.pop("_class_path", "")).rpartition(".")
    if named and getattr(sys.modules.get(module), own, None) is not made:
        raise ValueError(
            f"{name} must be loaded as the class that it names, {named}; got {made.__name__}. Give "
            f"--model-class {named}."
        )
    lost = [
        f"{key}={value!r}"
        for key, value in saved.items()
        if key not in arguments.parameters
        and (key not in model.hparams or repr(model.hparams[key]) != repr(value))
    ]
    if lost:
        raise ValueError(
            f"the class of {name} must take its hyperparameters; {listed(lost)} cannot be given to "
            f"{made.__name__}, which makes another model. Give it such arguments, or {remedy}"
        )


def _require_as_stored(
    model: nn.Module, weights: Mapping[str, Any], name: str, wanted: torch.dtype
) -> None:
    """Check that a file has one value for what is one parameter of the model, and that the dtype of
    the model has rounded none more than the one that is wanted.
    """
    first: dict[tuple[int, torch.Size], str] = {}
    for key, value in model.state_dict().items():
        if key in weights and isinstance(value, torch.Tensor) and value.numel():
            other = first.setdefault((value.data_ptr(), value.shape), key)
            one = weights[key]
            two = weights[other]
            if key != other and not ((one == two) | (one.isnan() & two.isnan())).all():
                raise ValueError(
                    f"{name} must have one value for one parameter; {other} and {key} differ, "
                    "which the model ties. Give a model_class that does not."
                )
            if value.is_floating_point() and value.dtype not in {
                torch.promote_types(value.dtype, other) for other in (weights[key].dtype, wanted)
            }:
                raise ValueError(
                    f"model_class must make a model that does not round the weights of {name}; it "
                    f"makes {key} in {value.dtype}. Let it make a model in {wanted}."
                )


def _weights_of(model: nn.Module, stored: Any, name: str) -> dict[str, Any]:
    """What a training loop has saved of a model: its state dict alone or beside others, under its
    own names or inside of another module; one that is there once.
    """
    # averages may be of these alone
    wanted = (dict(model.named_parameters()) or model.state_dict()).keys()
    first = next(iter(wanted), "")
    by_place: dict[tuple[str, str], dict[str, Any]] = {}
    for place, weights in nested(stored):
        ends = {
            key.removesuffix(first)
            for key, value in weights.items()
            if f".{key}".endswith(f".{first}") and isinstance(value, torch.Tensor)
        }
        for start in sorted(ends):
            by_place[place, start] = {
                key.removeprefix(start): weights[key] for key in weights if key.startswith(start)
            }
    whole = [
        " ".join(filter(None, place)) for place, held in by_place.items() if wanted <= held.keys()
    ]
    # of a compiled model, say, beside its averages
    alike = {place for (place, _), held in by_place.items() if len(wanted & held.keys()) > 1}
    if len(whole) > 1 or len(alike) > 1:
        several = listed([each or "itself" for each in whole if len(whole) > 1] or sorted(alike))
        raise ValueError(
            f"{name} must hold the weights of one model; it holds several: {several}. Save one "
            "alone."
        )
    wanted = model.state_dict().keys()
    return min(by_place.values(), key=lambda weights: len(weights.keys() ^ wanted), default={})


def import_maker(model_class: ModelClass) -> Any:
    """The LightningModule of this name, ``package.module.Class``, or what makes a model,
    ``package.module:make``; a class or function itself.
    """
    if not isinstance(model_class, str):
        return model_class
    rule = (
        "model_class must name a LightningModule as package.module.Class, or what makes a torch "
        "module without arguments as package.module:make, in a module that can be imported"
    )
    return import_function(model_class, rule)


def import_function(name: str, rule: str) -> Any:
    """What is called ``package.module.name``, or ``package.module:name``; ValueError with the rule
    of an argument if it cannot be imported, or called.
    """
    with requiring(rule, name):
        function = import_named(name.replace(":", "."))
        if not callable(function):
            raise TypeError(f"it is a {type(function).__name__}")
    return function


def make_model(make: Callable[..., Any], name: object) -> nn.Module:
    """The model that a function or class of this name makes."""
    with requiring("model_class must name what makes a torch module without arguments", name):
        model = make()
        if not isinstance(model, nn.Module):
            raise TypeError(f"it makes a {type(model).__name__}")
    return model


@contextmanager
def requiring(rule: str, name: object) -> Iterator[None]:
    """Raise a ValueError with the rule of an argument in place of any error of the code that it
    names.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(f"{rule}; got {name!r} ({reason(error)}).") from error


def import_named(name: str) -> Any:
    """Import ``package.module.name``, which may raise anything; a module in the working directory
    with what it imports, then and later.
    """
    module_name, _, attribute = name.rpartition(".")
    folder = os.getcwd()
    top = module_name.partition(".")[0]
    if folder in sys.path or not (os.path.isdir(top) or os.path.isfile(f"{top}.py")):
        return getattr(import_module(module_name), attribute)
    sys.path.insert(0, folder)
    try:
        return getattr(import_module(module_name), attribute)
    finally:  # no library that is imported later is looked for there first
        sys.path.remove(folder)
        sys.path.append(folder)


def stated_positions(model: nn.Module) -> int | None:
    """Positions that the configuration of a model says it has; None if it says nothing."""
    stated = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(stated, int) or stated < 1:  # of XLNet, which has no limit
        return None
    # RoBERTa's table has positions up to that of padding, which it never uses
    tables = (
        module for name, module in model.named_modules() if name.endswith("position_embeddings")
    )
    return stated - max(
        (1 + t.padding_idx for t in tables if getattr(t, "padding_idx", None) is not None),
        default=0,
    )
