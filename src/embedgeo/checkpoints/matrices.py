"""The embedding matrices of a checkpoint, read without the rest of its weights where its files allow that."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from embedgeo.capture.structure import input_embedding
from embedgeo.checkpoints.configuration import load_config
from embedgeo.checkpoints.files import Contents, weight_files
from embedgeo.checkpoints.loading import empty_model, load_model
from embedgeo.checkpoints.reading import reading

_IN_FILES = {"lm_head.weight": "embed_out.weight"}
"""Names that files have for tensors of a model: of GPT-NeoX, whose head transformers 5 calls as that of others."""


class Matrices(NamedTuple):
    """The embedding matrices of a model; their rows are the vocabulary.

    Attributes:
        input: shape (vocabulary, d): what token ids are looked up in.
        output: shape (vocabulary, d): what hidden states are multiplied with; None if the checkpoint has none.
        is_tied: whether both are one matrix.
        model_class: of the model.
    """

    input: Tensor
    output: Tensor | None
    is_tied: bool
    model_class: str


class _Stored(NamedTuple):
    """Where the matrices of a model may be in the files of its checkpoint.

    Attributes:
        input: names of the tensor.
        output: likewise; none if the model has no such matrix.
        shapes: of both.
        is_tied: whether the configuration makes them one.
        model_class: of the model.
    """

    input: list[str]
    output: list[str]
    shapes: list[torch.Size]
    is_tied: bool
    model_class: str

    def found(self, names: Mapping[str, object]) -> list[str] | None:
        """The names of the matrices among those of the files: one if they are tied; None if they are not all there."""
        found = [next((name for name in kind if name in names), "") for kind in (self.input, self.output)]
        if self.is_tied and any(found):
            return list(filter(None, found))
        wanted = found if self.output else found[:1]
        return wanted if all(wanted) else None


def read_matrices(folder: Path, contents: Contents, *, dtype: torch.dtype, trust_remote_code: bool = False) -> Matrices:
    """The input and the output embedding of a Hugging Face checkpoint.

    Of safetensors files only these tensors are read, if they have the names and shapes of the model's; otherwise the
    model is loaded. A bias of the output is not part of its matrix.

    Args:
        folder: with the files.
        contents: of the checkpoint; only the files of `needed_contents` have to be there.
        dtype: of the matrices.
        trust_remote_code: run code that comes with the checkpoint.

    Raises:
        ValueError: a file that cannot be read, or a model without an embedding table of tokens.
    """
    stored = _stored(folder, trust_remote_code=trust_remote_code)
    files: dict[str, Path] = {}
    for path in (folder / file.name for file in weight_files(contents.weights)):
        if path.suffix == ".safetensors":
            with reading(path.name), safe_open(path, "pt") as opened:
                files |= dict.fromkeys(opened.keys(), path)
    if names := stored.found(files):
        tensors = [_tensor(files[name], name, dtype) for name in names]
        if all(tensor.shape in stored.shapes for tensor in tensors):
            table, head = tensors[0], tensors[1] if len(tensors) > 1 else None
            # as transformers ties: not those of which the files have two that differ
            is_tied = stored.is_tied and (head is None or head.equal(table))
            return Matrices(table, table if is_tied else head, is_tied, stored.model_class)
    loaded = load_model(folder, contents, dtype=dtype, trust_remote_code=trust_remote_code, may_be_both=True)
    inputs, outputs = (None if weight is None else weight.detach() for weight in _weights(loaded.model))
    assert inputs is not None
    is_tied = outputs is not None and outputs.data_ptr() == inputs.data_ptr()
    return Matrices(inputs, outputs if is_tied or loaded.has_head else None, is_tied, stored.model_class)


def needed_contents(contents: Contents, folder: Path, *, trust_remote_code: bool = False) -> Contents:
    """The files that `read_matrices` needs of a checkpoint in several safetensors files; all where that is not known.

    Args:
        contents: of the checkpoint.
        folder: with its ``config.json`` and the index of its weights.
        trust_remote_code: run code that comes with the checkpoint.
    """
    index = next((file for file in contents.weights if file.name.endswith(".safetensors.index.json")), None)
    if index is None:
        return contents
    with reading(index.name):
        places = dict(json.loads((folder / index.name).read_text())["weight_map"])
    names = _stored(folder, trust_remote_code=trust_remote_code).found(places)
    if names is None:
        return contents
    wanted = {places[name] for name in names}
    return replace(contents, weights=tuple(file for file in contents.weights if file.name in wanted))


def _stored(folder: Path, *, trust_remote_code: bool) -> _Stored:
    config = load_config(folder, trust_remote_code=trust_remote_code, may_be_both=True)
    model = empty_model(config, trust_remote_code=trust_remote_code)
    table, head = _weights(model)
    at_head = {f"{name}.weight" for name, module in model.named_modules() if module is _head(model)}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."

    def names_of(weight: Tensor | None, *, of_head: bool) -> list[str]:
        every = model.named_parameters(remove_duplicate=False)
        names = [name for name, each in every if each is weight and (name in at_head) == of_head]
        bare = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        return [*names, *bare, *(_IN_FILES[name] for name in names if name in _IN_FILES)]

    return _Stored(
        names_of(table, of_head=False),
        [] if head is None else names_of(head, of_head=True),
        [weight.shape for weight in (table, head) if weight is not None],
        head is table,
        type(model).__name__,
    )


def _weights(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The weights of the input and the output embedding; None for one that a model has not."""
    table = getattr(input_embedding(model), "weight", None)
    if table is None or table.ndim != 2:
        raise ValueError(f"a vocabulary needs an embedding table of tokens; {type(model).__name__} has none.")
    return table, getattr(_head(model), "weight", None)


def _head(model: nn.Module) -> nn.Module | None:
    get_head = getattr(model, "get_output_embeddings", None)
    return get_head() if callable(get_head) else None


def _tensor(path: Path, name: str, dtype: torch.dtype) -> Tensor:
    with reading(path.name), safe_open(path, "pt") as opened:
        return opened.get_tensor(name).to(dtype)
