"""The files of a checkpoint: which are needed, their hashes, and which checkpoints have the same
weights.
"""

import argparse
import hashlib
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any, NamedTuple

import jsonargparse
from safetensors import safe_open

from embedgeo.formatting import listed, reason
from embedgeo.results.files import digest

_WEIGHTS = (  # in the order in which transformers looks for them
    re.compile(r"model\.safetensors"),
    re.compile(r"model\.safetensors\.index\.json|model-\d+-of-\d+\.safetensors"),
    re.compile(r"pytorch_model\.bin"),
    re.compile(r"pytorch_model\.bin\.index\.json|pytorch_model-\d+-of-\d+\.bin"),
)
UNUSED = re.compile(
    r"(inv_freq|position_ids|(attn|attention)\.(masked_)?bias)$"
    r"|(^|\.)(pooler|seq_relationship|(pre_)?classifier|score|qa_outputs|discriminator_predictions)\."
)
"""Buffers that models make themselves, and heads of other tasks: no hidden state is of these."""
# of numbers that are the weights; empty for what is no tensor
_FLOATS = re.compile(r"F(16|32|64)$|float(16|32|64)$|^$")
_OTHER_FORMATS = {
    "adapter_*": "merge it into the model by merge_and_unload of PEFT, and save_pretrained",
    "*.distcp": "save the weights in one file, by torch.distributed.checkpoint.format_utils",
    "*lit_model*.pth": "convert the weights, by litgpt convert_from_litgpt",
    "*.gguf": "take the model that this was converted from",
    "*_model_states.pt": "save the weights in one file, by zero_to_fp32.py of DeepSpeed",
    "zero_to_fp32.py": "save the weights in one file, by this script of DeepSpeed",
    "pytorch_model_fsdp_*": "save the weights in one file, by accelerate merge-weights",
}
VOCABULARIES = frozenset(
    {
        "tokenizer.json",
        "vocab.json",
        "vocab.txt",
        "tokenizer.model",
        "spiece.model",
        "sentencepiece.bpe.model",
        "sentencepiece.model",
        "spm.model",
    }
)
"""Every tokenizer has at least one of these files."""
TOKENIZER_FILES = VOCABULARIES | {
    "added_tokens.json",
    "bpe.codes",
    "dict.txt",
    "emoji.json",
    "entity_vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "word_pronunciation.json",
    "word_shape.json",
}
# names under which files hold their step
_STEPS = "global_step", "step", "iter_num", "iteration"
_LARGEST_FILE = 256 * 2**20  # larger files, other than weights, are refused

_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
# classes that hyperparameters may hold besides those that torch loads by itself: these only keep
# values
_HARMLESS: tuple[Callable[..., Any] | tuple[Callable[..., Any], str], ...] = (
    argparse.Namespace,
    jsonargparse.Namespace,
    SimpleNamespace,
    *((Path, f"{module}.{name}") for module in ("pathlib", "pathlib._local") for name in _PATHS),
)


class StoredFile(NamedTuple):
    """A file of a checkpoint."""

    name: str
    size: int  # bytes
    # sha256 in hexadecimal; if the Hub lists none, ``git:`` and the hash of git; or empty
    digest: str


@dataclass(frozen=True)
class Contents:
    """The files that are needed to load a checkpoint."""

    # in one format, sorted by name, with their index if there is one
    weights: tuple[StoredFile, ...]
    others: tuple[StoredFile, ...] = ()  # ``config.json``, the tokenizer's files, trusted code

    @property
    def sha256(self) -> str:
        """The sha256 of the weight file; of several files, the sha256 of the output of
        ``sha256sum``; empty where they are not hashed.
        """
        files = weight_files(self.weights)
        if len(files) == 1 or not files[0].digest:
            return files[0].digest
        lines = "".join(f"{file.digest}  {file.name}\n" for file in files)
        return hashlib.sha256(lines.encode()).hexdigest()

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the weight files by name."""
        return {file.name: file.digest for file in weight_files(self.weights)}

    @property
    def config_digest(self) -> str:
        """Digests of ``config.json`` and trusted code: the same weights give other results with
        others.
        """
        return "".join(
            file.digest
            for file in self.others
            if file.name == "config.json" or file.name.endswith(".py")
        )

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """All files."""
        return *self.weights, *self.others


def needed_files(files: Iterable[StoredFile], *, with_code: bool = False) -> Contents:
    """Select the files to load: weights in one format, ``config.json``, those of the tokenizer,
    and the code if asked for.
    """
    # whole names are matched, so that none is outside the checkpoint's folder
    files = sorted(files)
    others = tuple(
        file
        for file in files
        if file.name in {"config.json", *TOKENIZER_FILES}
        or (with_code and re.fullmatch(r"\w+\.py", file.name))
    )
    formats = ([file for file in files if pattern.fullmatch(file.name)] for pattern in _WEIGHTS)
    weights = next(filter(weight_files, formats), [])
    names = [file.name for file in files]
    if not weights:
        raise FileNotFoundError(
            "a checkpoint must have weights: safetensors or pytorch_model .bin files; found none."
            f"{other_format(names)}"
        )
    if adapters := [name for name in names if name.startswith("adapter_")]:
        raise ValueError(
            f"a checkpoint must have weights, and no adapter beside them; found {listed(adapters)}."
            f"{other_format(adapters)} Or move it away, to have the weights alone measured."
        )
    if not any(file.name == "config.json" for file in others):
        raise FileNotFoundError("a checkpoint must have a config.json; found none.")
    for file in (*others, *(f for f in weights if f.name.endswith(".json"))):
        if file.size > _LARGEST_FILE:
            raise ValueError(
                f"{file.name} must be smaller than {_LARGEST_FILE >> 20} MiB; it has {file.size} "
                f"bytes."
            )
    return Contents(tuple(weights), others)


def other_format(names: Iterable[str]) -> str:
    """How files of weights in another format are made into those that are read, after a space;
    empty if none of the names is of one.
    """
    for name in names:
        for pattern, remedy in _OTHER_FORMATS.items():
            if fnmatchcase(name, pattern):
                return f" {name}: {remedy}."
    return ""


def weight_files(files: Iterable[StoredFile]) -> list[StoredFile]:
    """The files that hold weights: all but their index."""
    return [file for file in files if not file.name.endswith(".json")]


def hashed_file(path: Path) -> StoredFile:
    """Size and sha256 of a local file."""
    return StoredFile(path.name, path.stat().st_size, digest(path))


def sample_digest(paths: Iterable[Path]) -> str:
    """A digest of the sizes of files and of 64 parts of each: others are other files, the same may
    be.
    """
    sampled = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        sampled.update(f"{size} ".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(4096, size // 64)):
                file.seek(start)
                sampled.update(file.read(4096))
    return sampled.hexdigest()


def duplicates(identities: Mapping[str, str]) -> dict[str, str]:
    """Map each name whose value has occurred before to the first name with that value."""
    first: dict[str, str] = {}
    owners = {name: first.setdefault(identity, name) for name, identity in identities.items()}
    return {name: owner for name, owner in owners.items() if owner != name}


def require_whole_index(folder: Path, weights: Sequence[StoredFile]) -> None:
    """Check that the index of the weights names exactly the weight files of the checkpoint, none
    outside it.
    """
    index = next((file for file in weights if file.name.endswith(".json")), None)
    if index is None:
        if len(weights) > 1:
            raise ValueError(f"weights in {len(weights)} files must have an index; found none.")
        return
    try:
        named = set(json.loads((folder / index.name).read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index.name} cannot be read: it must be JSON with a weight_map; {reason(error)}."
        ) from error
    held = {file.name for file in weight_files(weights)}
    if named != held:
        raise ValueError(
            f"{index.name} must name the checkpoint's weight files; it names {sorted(named)[:4]}, "
            f"the checkpoint holds {sorted(held)[:4]}."
        )


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Raise a ValueError that names the file in place of any error, without the advice of the
    library behind it.
    """
    try:
        yield
    except Exception as error:
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        why = reason(error).rstrip(".")
        if refused:
            why = (
                f"it holds a pickled {refused[1]}, which is not loaded, as that may run code; save "
                "it without"
            )
        elif isinstance(error, UnpicklingError | KeyError | EOFError | RuntimeError):
            why = f"it is damaged, or was not written by torch.save ({type(error).__name__})"
        raise ValueError(f"{name} cannot be read: {why}.") from error


def harmless_allowed() -> AbstractContextManager[None]:
    """Let ``weights_only`` loading accept paths and namespaces, which Lightning's hyperparameters
    may hold.
    """
    import torch  # not at the top: a wrong option of the command line is refused before

    return torch.serialization.safe_globals(list(_HARMLESS))


def stored_values(path: Path, device: str = "meta") -> Any:
    """Values that ``torch.save`` has written, without running code; on ``meta`` tensors have no
    data.
    """
    import torch

    with reading(path.name), harmless_allowed():
        mapped = device != "meta" and zipfile.is_zipfile(path)
        return torch.load(path, map_location=device, weights_only=True, mmap=mapped)


def weight_types(path: Path) -> dict[str, str]:
    """The data types of the weights in a file by name, without reading the weights; the file must
    be whole.
    """
    if path.suffix == ".safetensors":
        with reading(path.name), safe_open(path, "pt") as file:
            names = file.keys()
            return {name: file.get_slice(name).get_dtype() for name in names}
    stored = stored_values(path)
    if not isinstance(stored, dict) or not all(hasattr(each, "dtype") for each in stored.values()):
        raise ValueError(f"{path.name} must hold weights by their names; it does not.")
    return {name: str(weight.dtype) for name, weight in stored.items()}


def quantized(types: Mapping[str, str], model: Any) -> str:
    """The first weight of less than 16 bits, or of whole numbers which the model has not, with its
    type; empty if none is. Its scale may be elsewhere.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    # files may have other names for what it is in
    whole = {name.rpartition(".")[2] for name, t in tensors if not t.is_floating_point()}
    for name, kind in types.items():
        if not (_FLOATS.search(kind) or UNUSED.search(name) or name.rpartition(".")[2] in whole):
            return f"{name} of {kind}"
    return ""


def stored_step(path: Path) -> int:
    """Optimizer steps taken, as stored in a file of Lightning or of a training loop."""
    stored = stored_values(path)
    steps = [stored.get(key) for key in _STEPS] if isinstance(stored, dict) else []
    for step in steps:
        if isinstance(step, int | str) and str(step).isdecimal():
            return int(step)
    raise ValueError(
        f"a file must say its step in its name or as {' or '.join(_STEPS)}; {path.name} does "
        "neither."
    )


def have_same_weights(*paths: Path) -> bool:
    """True if the tensors in two files begin alike, those of one number apart."""
    starts = []
    for path in paths:
        with suppress(ValueError):
            starts.append(
                {
                    (place, name): value.flatten()[:4096].tolist()
                    for place, values in nested(stored_values(path, "cpu"))
                    for name, value in values.items()
                    if hasattr(value, "numel") and value.numel() > 1
                }
            )
    return len(starts) == 2 and starts[0] == starts[1]


def nested(stored: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """What is stored by names, also inside of another, with its place there."""
    if isinstance(stored, dict):
        if all(isinstance(key, str) for key in stored):
            yield place, stored
        for key, value in stored.items():
            yield from nested(value, f"{place} {key}".strip())
