"""Load models and tokenizers, without running code that comes with a checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
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

from embedgeo.capture.structure import input_embedding, measured_model
from embedgeo.checkpoints.configuration import load_config
from embedgeo.checkpoints.devices import DeviceMap, placement
from embedgeo.checkpoints.files import Contents, require_whole_index, weight_files
from embedgeo.checkpoints.naming import import_named
from embedgeo.checkpoints.reading import harmless_allowed, reading, require_readable, stored_values
from embedgeo.results.wording import reason

_MOST_TENSORS = 200_000
"""Parameters of a model: each costs memory even without data, and some counts of modules are not called layers."""


@dataclass
class LoadedModel:
    """A model in evaluation mode.

    Attributes:
        model: a Hugging Face model, or a LightningModule.
        is_encoder: whether it predicts masked tokens rather than the next one.
        has_head: whether the checkpoint holds the weights that predict tokens.
    """

    model: nn.Module
    is_encoder: bool = False
    has_head: bool = True


def is_encoder(config: PreTrainedConfig) -> bool:
    """Whether the model predicts masked tokens rather than the next one."""
    masked = type(config) in AutoModelForMaskedLM._model_mapping
    causal = any(name.endswith(("CausalLM", "LMHeadModel")) for name in config.architectures or [])
    return masked and not causal and not getattr(config, "is_decoder", False)


def empty_model(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> nn.Module:
    """The model of a configuration, without memory for its weights.

    Raises:
        ValueError: it has more parameters than any real model.
    """
    num_tensors = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal num_tensors
        num_tensors += 1
        if num_tensors > _MOST_TENSORS:
            raise ValueError(f"config.json must describe at most {_MOST_TENSORS} parameters; it describes more.")

    hook = register_module_parameter_registration_hook(count)
    try:
        with torch.device("meta"):
            # in the dtype that torch has already: another one would be set for all threads
            return _auto_class(config).from_config(
                config, dtype=torch.get_default_dtype(), trust_remote_code=trust_remote_code
            )
    finally:
        hook.remove()


def _auto_class(config: PreTrainedConfig) -> Any:
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM if type(config) in AutoModelForSeq2SeqLM._model_mapping else AutoModel
    if is_encoder(config):
        return AutoModelForMaskedLM
    if type(config) in AutoModelForCausalLM._model_mapping or "AutoModelForCausalLM" in getattr(config, "auto_map", {}):
        return AutoModelForCausalLM
    is_part = type(config) in AutoModelForTextEncoding._model_mapping  # as T5's encoder, saved by itself
    return AutoModelForTextEncoding if is_part else AutoModel


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

    Weights whose dtype is the one asked for are not copied into memory but mapped from the files, which must stay.

    Args:
        folder: with the files.
        contents: which of them to load.
        dtype: of the weights.
        trust_remote_code: run code that comes with the checkpoint.
        device_map: where the weights go, see `placement`; default: the CPU.
        offload_folder: for those that go on disk and are not in a safetensors file as the model has them.
        may_be_both: whether it may be of an encoder-decoder.

    Raises:
        ValueError: a file that cannot be read, or a configuration or a device map that does not match the weights.
    """
    require_whole_index(folder, contents.weights)
    for file in weight_files(contents.weights):
        require_readable(folder / file.name)
    config = load_config(folder, trust_remote_code=trust_remote_code, may_be_both=may_be_both)
    num_bytes = sum(file.size for file in weight_files(contents.weights))
    empty = empty_model(config, trust_remote_code=trust_remote_code)
    described = sum(t.numel() for t in (*empty.parameters(), *empty.buffers()))
    if described > 4 * num_bytes:  # a weight takes half a byte or more; some are tied, or of a head that is not there
        raise ValueError(
            f"config.json must fit the weights; it describes {described:.3g} numbers, the files hold {num_bytes} bytes."
        )
    placed = None if device_map is None else placement(empty, device_map)
    del empty
    auto_class = _auto_class(config)
    model, info = auto_class.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        device_map=placed,
        offload_folder=offload_folder,
        local_files_only=True,
        output_loading_info=True,
        trust_remote_code=trust_remote_code,
        use_safetensors=contents.weights[0].name.endswith((".safetensors", ".safetensors.index.json")),
        weights_only=True,
    )
    body = f"{model.base_model_prefix}."
    missing = sorted(info["missing_keys"])
    lacking = [name for name in missing if model.base_model is model or name.startswith(body)]
    if lacking or info["mismatched_keys"]:
        first = lacking or sorted(map(str, info["mismatched_keys"]))
        raise ValueError(f"a checkpoint must hold all weights of the model; missing or misshapen: {first[:4]}.")
    has_head = auto_class not in (AutoModel, AutoModelForTextEncoding) and not missing
    model.config.use_cache = False  # nothing is generated
    return LoadedModel(model.eval(), is_encoder(config), has_head)


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, or in a file as ``tokenizer.json``.

    Raises:
        ValueError: the file cannot be read.
    """
    tokenizer: PreTrainedTokenizerBase
    file = path if path.is_file() else path / "tokenizer.json"
    if file.is_file():
        with reading(file.name):
            parsed = Tokenizer.from_file(str(file))
    if file == path:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=parsed)
    else:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    tokenizer.model_max_length = 10**12  # documents are cut into sequences afterwards: no warning about their length
    return tokenizer


def load_lightning(path: Path, model_class: str, *, dtype: torch.dtype) -> LoadedModel:
    """Load a Lightning checkpoint; a model without ``forward`` of its own is called by its ``predict_step``.

    Args:
        path: the ``.ckpt`` file.
        model_class: its LightningModule, as ``package.module.Class``.
        dtype: of the weights.

    Raises:
        ValueError: ``model_class`` is not one, or a file that cannot be read.
    """
    kind = import_class(model_class)
    require_readable(path)
    with harmless_allowed():
        module = kind.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    if measured_model(module) is module and not has_own(module, "forward") and has_own(module, "predict_step"):
        module.__class__ = type(kind.__name__, (kind,), {"forward": lambda self, ids: self.predict_step(ids, 0)})
    config = getattr(measured_model(module), "config", None)
    return LoadedModel(module.to(dtype).eval(), isinstance(config, PreTrainedConfig) and is_encoder(config))


def has_own(module: nn.Module, method: str) -> bool:
    """Whether a method is the model's own rather than one that Lightning has put there in its place."""
    owner = str(getattr(type(module), method).__module__)
    return not owner.startswith(("lightning.", "pytorch_lightning."))


def import_class(model_class: str) -> Any:
    """The LightningModule of this name; modules in the working directory are found, too.

    Raises:
        ValueError: there is no such class, or its module fails or exits when it is imported.
    """
    try:
        kind = import_named(model_class)
        if not hasattr(kind, "load_from_checkpoint"):
            raise TypeError(f"it is a {type(kind).__name__}")
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"model_class must name a LightningModule as package.module.Class, in a module that can be imported; got "
            f"{model_class!r} ({reason(error)})."
        ) from error
    return kind


def lightning_step(path: Path) -> int:
    """Optimizer steps taken, as stored in a Lightning checkpoint.

    Raises:
        ValueError: they cannot be read from the file.
    """
    stored = stored_values(path)
    try:
        return int(stored["global_step"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"a .ckpt must say its step in its name or as global_step; {path.name} does neither."
        ) from error


def num_token_types(model: nn.Module) -> int | None:
    """Rows of the input embedding; None if the model has no embedding table."""
    return getattr(input_embedding(model), "num_embeddings", None)
