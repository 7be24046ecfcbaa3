"""Load models and tokenizers, without running code that comes with a checkpoint."""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForTextEncoding,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from embedgeo.capture.structure import input_embedding, measured_model, output_embedding
from embedgeo.checkpoints.files import (
    Contents,
    harmless_allowed,
    reading,
    require_readable,
    require_whole_index,
    stored_values,
    weight_files,
)
from embedgeo.formatting import listed, reason

_LAYERS = re.compile(r"layers?$|blocks?$|depth|stages?$|layers_|blocks_")
# a configuration expands their number into lists before there is a model to compare with the files
_MOST_LAYERS = 1000
# each costs memory even without data, and some counts of modules are not called layers
_MOST_TENSORS = 200_000
# GPT-NeoX's head, which transformers 5 calls as that of others
_IN_FILES = {"lm_head.weight": "embed_out.weight"}

DeviceMap = str | Mapping[str, Any]
"""``"auto"``, or devices by names of modules, where the innermost name counts; ``"disk"``: read
when it is needed.
"""


def load_config(
    folder: Path, *, trust_remote_code: bool = False, may_be_both: bool = False
) -> PreTrainedConfig:
    """The configuration of the model in a folder, which ``may_be_both`` an encoder and a
    decoder.
    """

    def require_harmless(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, value in pairs:
            if key.endswith("_implementation") and "/" in str(value) and not trust_remote_code:
                raise ValueError(
                    f"config.json: {key} must not name code on the Hub; got {value!r}. "
                    f"--trust-remote-code allows it."
                )
            if isinstance(value, int) and value > _MOST_LAYERS and _LAYERS.search(key):
                raise ValueError(f"config.json: {key} must be at most {_MOST_LAYERS}; got {value}.")
        return dict(pairs)

    json.loads(_read_object(folder / "config.json"), object_pairs_hook=require_harmless)
    with _naming_keys(folder / "config.json", is_trusted=trust_remote_code):
        config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    if config.is_encoder_decoder and not may_be_both:
        raise ValueError(
            f"a model must be a decoder or an encoder of text; {config.model_type} is both. "
            "Measure it by hand: embedgeo.observe."
        )
    return config


def _read_object(path: Path) -> bytes:
    """The content of a JSON file, which must be an object."""
    with reading(path.name):
        content = path.read_bytes()
        if not isinstance(json.loads(content), dict):
            raise TypeError("it must be an object")
    return content


@contextmanager
def _naming_keys(
    path: Path, *, is_trusted: bool, errors: type[Exception] = Exception
) -> Iterator[None]:
    """Raise a ValueError that names keys of a configuration, and our option, in place of an error
    of transformers.
    """
    try:
        yield
    except errors as error:
        message = " ".join(str(error).split())
        values: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            values = dict(json.loads(path.read_text()))
        is_of_model = path.name == "config.json"
        kind = values.get("model_type", "none")
        is_known = is_of_model and isinstance(kind, str) and kind in CONFIG_MAPPING
        if (
            "auto_map" in values
            and not is_trusted
            and (not is_known or "trust_remote_code" in message)
        ):
            why = (
                "auto_map names code that comes with the model, which is not run; "
                "--trust-remote-code runs it"
            )
        elif not is_of_model or message.startswith("config.json"):
            raise
        elif not is_known and "auto_map" not in values:
            why = (
                f"model_type must be one that transformers {version('transformers')} knows; got "
                f"{kind}"
            )
        else:
            named = [key for key, value in _entries(values) if _is_about(error, key, value)]
            first = re.split(r"(?<=\w[.!]) ", message[:300], maxsplit=1)[0].rstrip(".")
            why = (
                f"transformers cannot take {listed(named) or 'it'} ({type(error).__name__}: "
                f"{first})"
            )
        raise ValueError(f"{path.name}: {why}.") from error


def _entries(values: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        yield f"{start}{key}", value
        if isinstance(value, Mapping):
            yield from _entries(value, f"{start}{key}.")


def _is_about(error: Exception, key: str, value: Any) -> bool:
    """Tell if an error names an entry of a configuration, by its key or by its value in quotes, or
    needs a package.
    """
    message = str(error)
    is_quoted = (
        isinstance(value, str) and re.search(f"[\"'`]{re.escape(value)}[\"'`]", message) is not None
    )
    is_package = isinstance(error, ImportError) and key == "quantization_config"
    return (
        is_quoted
        or is_package
        or ("_" in key and key.removeprefix("_") in re.findall(r"\w+", message))
    )


def is_encoder(config: PreTrainedConfig) -> bool:
    """Tell a model that predicts masked tokens from one that predicts the next one."""
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING
    causal = any(name.endswith(("CausalLM", "LMHeadModel")) for name in config.architectures or [])
    return masked and not causal and not getattr(config, "is_decoder", False)


def empty_model(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> nn.Module:
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
            return _auto_class(config).from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
    finally:
        hook.remove()


def described_model(folder: Path, *, trust_remote_code: bool = False) -> nn.Module:
    """The model that the configuration in a folder describes, an encoder and decoder, too; without
    memory for it.
    """
    config = load_config(folder, trust_remote_code=trust_remote_code, may_be_both=True)
    with _naming_keys(folder / "config.json", is_trusted=trust_remote_code):
        return empty_model(config, trust_remote_code=trust_remote_code)


def _auto_class(config: PreTrainedConfig) -> Any:
    if config.is_encoder_decoder:
        return (
            AutoModelForSeq2SeqLM
            if type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
            else AutoModel
        )
    if is_encoder(config):
        return AutoModelForMaskedLM
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in getattr(
        config, "auto_map", {}
    ):
        return AutoModelForCausalLM
    is_part = type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING  # as T5's encoder, saved by itself
    return AutoModelForTextEncoding if is_part else AutoModel


def placement(model: nn.Module, device_map: DeviceMap) -> str | dict[str, str]:
    """A device map of modules none of which is inside another, as accelerate needs it; ``"auto"``
    as it is.
    """
    if isinstance(device_map, str):
        return device_map
    names = [name for name, _ in model.named_modules()]
    if unknown := sorted(map(str, device_map.keys() - set(names))):
        raise ValueError(
            f"device_map must name modules of {type(model).__name__}, such as {names[-1]!r}; got "
            f"{', '.join(unknown)}."
        )
    devices = {name: _device(value) for name, value in device_map.items()}
    placed: dict[str, str] = {}

    def place(name: str, part: nn.Module, outer: str | None) -> None:
        prefix = f"{name}." if name else ""
        device = devices.get(name, outer)
        if any(other.startswith(prefix) and other != name for other in devices):
            for child, inner in part.named_children():
                place(prefix + child, inner, device)
            own = [prefix + parameter for parameter, _ in part.named_parameters(recurse=False)]
        else:
            own = [name] if any(True for _ in part.parameters()) else []
        if own and device is None:
            raise ValueError(
                f"device_map must give each weight a device; {own[0]} has none. Add one for '': "
                f"the rest."
            )
        placed.update(dict.fromkeys(own, str(device)))

    place("", model, None)
    return placed


def _device(value: Any) -> str:
    """The name of one of the machine's devices, or ``disk``."""
    accelerator = torch.accelerator.current_accelerator()
    known = [
        "cpu",
        "disk",
        *(f"{accelerator}:{i}" for i in range(torch.accelerator.device_count())),
    ]
    try:
        device = torch.device("cpu" if value == "disk" else value)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    name = device.type if device.type == "cpu" else f"{device.type}:{device.index or 0}"
    if name not in known:
        raise ValueError(
            f"device_map must name devices of this machine, {', '.join(known)}; got {value!r}."
        )
    return "disk" if value == "disk" else name


@dataclass
class LoadedModel:
    """A model in evaluation mode, of Hugging Face or Lightning; its head is the weights that
    predict tokens.
    """

    model: nn.Module
    is_encoder: bool = False
    has_head: bool = True


def load_model(
    folder: Path,
    contents: Contents,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    device_map: DeviceMap | None = None,
    offload_folder: Path | None = None,
    may_be_both: bool = False,
) -> LoadedModel:
    """Load a Hugging Face checkpoint: only weights, and code that comes with it only if trusted.

    Weights whose dtype is the one asked for are not copied into memory but mapped from the files,
    which must stay. Others that a `placement` puts on disk go into the ``offload_folder``.
    """
    require_whole_index(folder, contents.weights)
    for file in weight_files(contents.weights):
        require_readable(folder / file.name)
    config = load_config(folder, trust_remote_code=trust_remote_code, may_be_both=may_be_both)
    with _naming_keys(folder / "config.json", is_trusted=trust_remote_code):
        empty = empty_model(config, trust_remote_code=trust_remote_code)
    described = sum(t.numel() for t in (*empty.parameters(), *empty.buffers()))
    num_bytes = sum(file.size for file in weight_files(contents.weights))
    # a weight takes half a byte or more; some are tied, or of a head that is not there
    if described > 4 * num_bytes:
        raise ValueError(
            f"config.json must fit the weights; it describes {described:.3g} numbers, the files "
            f"hold {num_bytes} bytes."
        )
    placed = None if device_map is None else placement(empty, device_map)
    del empty
    auto_class = _auto_class(config)
    # of a quantization
    with _naming_keys(folder / "config.json", is_trusted=trust_remote_code, errors=ImportError):
        model, info = auto_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            device_map=placed,
            offload_folder=offload_folder,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
            use_safetensors=contents.weights[0].name.endswith(
                (".safetensors", ".safetensors.index.json")
            ),
            weights_only=True,
        )
    body = f"{model.base_model_prefix}."
    missing = sorted(info["missing_keys"])
    lacking = [name for name in missing if model.base_model is model or name.startswith(body)]
    if lacking or info["mismatched_keys"]:
        first = lacking or sorted(map(str, info["mismatched_keys"]))
        raise ValueError(
            f"a checkpoint must hold all weights of the model; missing or misshapen: {first[:4]}."
        )
    has_head = auto_class not in (AutoModel, AutoModelForTextEncoding) and not missing
    model.config.use_cache = False  # nothing is generated
    return LoadedModel(model.eval(), is_encoder(config), has_head)


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
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
            _read_object(config)
        with _naming_keys(config, is_trusted=trust_remote_code):
            tokenizer = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=trust_remote_code
            )
    # documents are cut into sequences afterwards: no warning about their length
    tokenizer.model_max_length = 10**12
    return tokenizer


def load_lightning(path: Path, model_class: str, *, dtype: torch.dtype) -> LoadedModel:
    """Load a Lightning checkpoint; a model without ``forward`` of its own is called by its
    ``predict_step``.
    """
    module_class = import_class(model_class)
    stored = stored_values(path)
    if not isinstance(stored, dict) or "state_dict" not in stored:
        raise ValueError(
            f"a .ckpt must be what Lightning saves, with a state_dict; {path.name} has none. Save "
            f"it by "
            "trainer.save_checkpoint, or a Hugging Face model as a folder by its save_pretrained."
        )
    with harmless_allowed():
        module = module_class.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    if (
        measured_model(module) is module
        and not has_own(module, "forward")
        and has_own(module, "predict_step")
    ):
        forward = {"forward": lambda self, ids: self.predict_step(ids, 0)}
        module.__class__ = type(module_class.__name__, (module_class,), forward)
    config = getattr(measured_model(module), "config", None)
    return LoadedModel(
        module.to(dtype).eval(), isinstance(config, PreTrainedConfig) and is_encoder(config)
    )


def import_class(model_class: str) -> Any:
    """The LightningModule of this name, ``package.module.Class``."""
    rule = (
        "model_class must name a LightningModule as package.module.Class, in a module that can be "
        "imported"
    )
    with requiring(rule, model_class):
        found = import_named(model_class)
        if not hasattr(found, "load_from_checkpoint"):
            raise TypeError(f"it is a {type(found).__name__}")
    return found


@contextmanager
def requiring(rule: str, name: str) -> Iterator[None]:
    """Raise a ValueError with the rule of an argument in place of any error of the code that it
    names.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(f"{rule}; got {name!r} ({reason(error)}).") from error


def import_named(name: str) -> Any:
    """Import ``package.module.name``, also of a module in the working directory, which may raise
    anything.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module_name, _, attribute = name.rpartition(".")
    return getattr(import_module(module_name), attribute)


def has_own(module: nn.Module, method: str) -> bool:
    """Tell a method of the model's own from one of Lightning's in its place."""
    return not getattr(type(module), method).__module__.startswith(
        ("lightning.", "pytorch_lightning.")
    )


def num_token_types(model: nn.Module) -> int | None:
    """Rows of the input embedding; None if the model has no embedding table."""
    return getattr(input_embedding(model), "num_embeddings", None)


def stated_positions(model: nn.Module) -> int | None:
    """Positions that the configuration of a model says it has; None if it says none."""
    stated = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(stated, int):
        return None
    # RoBERTa's table has positions up to that of padding, which it never uses
    tables = (
        module for name, module in model.named_modules() if name.endswith("position_embeddings")
    )
    paddings = [
        table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None
    ]
    return stated - max((1 + padding for padding in paddings), default=0)


class Matrices(NamedTuple):
    """The embedding matrices of a model, shape (vocabulary, d), which may be one; None for an
    output it has not.
    """

    input: Tensor
    output: Tensor | None
    is_tied: bool
    model_class: str


def read_matrices(
    folder: Path, contents: Contents, *, dtype: torch.dtype, trust_remote_code: bool = False
) -> Matrices:
    """The input and the output embedding of a Hugging Face checkpoint, of which `needed_contents`
    have to be there.

    Of safetensors files only these tensors are read, if they have the names and shapes of the
    model's; otherwise the model is loaded. A bias of the output is not part of its matrix.
    """
    model = described_model(folder, trust_remote_code=trust_remote_code)
    model_class = type(model).__name__
    table, head = _matrices(model)
    is_tied = head is table
    shapes = [weight.shape for weight in (table, head) if weight is not None]
    files: dict[str, Path] = {}
    for path in (folder / file.name for file in weight_files(contents.weights)):
        if path.suffix == ".safetensors":
            with reading(path.name), safe_open(path, "pt") as opened:
                files |= dict.fromkeys(opened.keys(), path)
    tensors = []
    for name in _matrix_names(model, files) or ():
        with reading(files[name].name), safe_open(files[name], "pt") as opened:
            tensors.append(opened.get_tensor(name).to(dtype))
    if tensors and all(tensor.shape in shapes for tensor in tensors):
        table = tensors[0]
        head = tensors[1] if len(tensors) > 1 else None
        # as transformers ties: not those of which the files have two that differ
        is_tied = is_tied and (head is None or head.equal(table))
        return Matrices(table, table if is_tied else head, is_tied, model_class)
    loaded = load_model(
        folder, contents, dtype=dtype, trust_remote_code=trust_remote_code, may_be_both=True
    )
    table, head = _matrices(loaded.model)
    is_tied = head is not None and head.data_ptr() == table.data_ptr()
    output = head.detach() if head is not None and (is_tied or loaded.has_head) else None
    return Matrices(table.detach(), output, is_tied, model_class)


def needed_contents(
    contents: Contents, folder: Path, *, trust_remote_code: bool = False
) -> Contents:
    """The files that `read_matrices` needs of a checkpoint in several safetensors files; all where
    that is not known.

    The folder need only have its ``config.json`` and the index of its weights.
    """
    index = next(
        (file for file in contents.weights if file.name.endswith(".safetensors.index.json")), None
    )
    if index is None:
        return contents
    with reading(index.name):
        places = dict(json.loads((folder / index.name).read_text())["weight_map"])
    names = _matrix_names(described_model(folder, trust_remote_code=trust_remote_code), places)
    if names is None:
        return contents
    wanted = {places[name] for name in names}
    return replace(
        contents, weights=tuple(file for file in contents.weights if file.name in wanted)
    )


def _matrix_names(model: nn.Module, names: Mapping[str, object]) -> list[str] | None:
    """Names of a model's matrices among those of its files: one if they are tied; None if they are
    not all there.
    """
    table, head = _matrices(model)
    at_head = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if module is output_embedding(model)
    }
    prefix = f"{getattr(model, 'base_model_prefix', '')}."

    def known_names(weight: Tensor, *, of_head: bool) -> list[str]:
        parameters = model.named_parameters(remove_duplicate=False)
        own = [name for name, each in parameters if each is weight and (name in at_head) == of_head]
        bare = [name.removeprefix(prefix) for name in own if name.startswith(prefix)]
        return [*own, *bare, *(_IN_FILES[name] for name in own if name in _IN_FILES)]

    of_table = known_names(table, of_head=False)
    of_head = [] if head is None else known_names(head, of_head=True)
    found = [next((name for name in known if name in names), "") for known in (of_table, of_head)]
    if head is table and any(found):
        return list(filter(None, found))
    wanted = found if of_head else found[:1]
    return wanted if all(wanted) else None


def _matrices(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The weights of the input and the output embedding; None for an output that a model has
    not.
    """
    table = getattr(input_embedding(model), "weight", None)
    if table is None or table.ndim != 2:
        raise ValueError(
            f"a vocabulary needs an embedding table of tokens; {type(model).__name__} has none."
        )
    return table, getattr(output_embedding(model), "weight", None)
