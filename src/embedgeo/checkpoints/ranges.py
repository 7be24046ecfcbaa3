"""Single tensors of a checkpoint, read by ranges of bytes out of its files, which are not
downloaded or loaded.
"""

import io
import json
import pickle
import struct
import zipfile
from collections import OrderedDict
from math import prod
from typing import Any, NamedTuple

import torch

from embedgeo.checkpoints import hub
from embedgeo.checkpoints.files import Contents, StoredFile, weight_files
from embedgeo.checkpoints.sources import Checkpoint
from embedgeo.formatting import reason

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
}
# bytes read at once at the start of a safetensors file, whose header is seldom longer
_HEADER = 2**17
_TAIL = 2**17  # bytes at the end of a zip file, where its directory is
_LONGEST_HEADER = 100_000_000  # bytes, as safetensors has it
_ALLOWED = {
    ("collections", "OrderedDict"): OrderedDict,
    # storage, offset, shape, stride
    ("torch._utils", "_rebuild_tensor_v2"): lambda *arguments: arguments[:4],
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
}


class StoredTensor(NamedTuple):
    """Place of a tensor of floating point numbers, in row-major order, among the files of a
    checkpoint.
    """

    file: str
    offset: int  # bytes from the start of the file; of a zip file, from that of ``record``
    shape: tuple[int, ...]
    dtype: torch.dtype
    record: int = -1  # where the header of the zip file's record is; -1 in a safetensors file


class WeightRanges:
    """Reads ranges of the weights of one checkpoint, on the Hub or in a folder."""

    def __init__(self, checkpoint: Checkpoint, contents: Contents) -> None:
        self._checkpoint = checkpoint
        self._contents = contents

    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors of floating point numbers by name, from the headers of all files of
        weights.
        """
        found: dict[str, StoredTensor] = {}
        for file in weight_files(self._contents.weights):
            try:
                found |= (
                    _in_safetensors(self, file)
                    if file.name.endswith(".safetensors")
                    else _in_zip(self, file)
                )
            except OSError:
                raise
            except Exception as error:
                why = str(error) if isinstance(error, ValueError) else reason(error)
                raise ValueError(f"{file.name} cannot be read: {why.rstrip('.')}.") from error
        return found

    def values(self, tensor: StoredTensor, count: int) -> torch.Tensor:
        """The first ``count`` values of a tensor, or all if there are fewer, shape (values,), in
        float64.
        """
        offset = tensor.offset
        if tensor.record >= 0:
            lengths = self.read(tensor.file, tensor.record, 30)[26:30]
            offset += tensor.record + 30 + sum(struct.unpack("<HH", lengths))
        count = min(count, prod(tensor.shape))
        data = self.read(tensor.file, offset, count * tensor.dtype.itemsize)
        return torch.frombuffer(bytearray(data), dtype=tensor.dtype).double()

    def read(self, file: str, start: int, length: int) -> bytes:
        """Bytes of a file."""
        if (path := self._checkpoint.path) is None:
            data = hub.read_range(
                self._checkpoint.model, self._checkpoint.commit, file, start, length
            )
        else:
            with (path / file if path.is_dir() else path).open("rb") as opened:
                opened.seek(start)
                data = opened.read(length)
        if len(data) < length:
            raise ValueError(
                f"{file} is damaged: it must have {length} bytes from {start} on; it has "
                f"{len(data)}"
            )
        return data


def _in_safetensors(ranges: WeightRanges, file: StoredFile) -> dict[str, StoredTensor]:
    start = ranges.read(file.name, 0, min(_HEADER, file.size))
    (length,) = struct.unpack("<Q", start[:8])
    if length > min(_LONGEST_HEADER, file.size):
        raise ValueError(f"its header must be shorter than the file; it says {length} bytes")
    header = start[8 : 8 + length]
    if len(header) < length:
        header += ranges.read(file.name, len(start), 8 + length - len(start))
    return {
        name: StoredTensor(
            file.name,
            8 + length + entry["data_offsets"][0],
            (*entry["shape"],),
            _DTYPES[entry["dtype"]],
        )
        for name, entry in json.loads(header).items()
        if entry.get("dtype") in _DTYPES
    }


def _in_zip(ranges: WeightRanges, file: StoredFile) -> dict[str, StoredTensor]:
    """The tensors that ``torch.save`` has written: its pickle, of which nothing is run, has their
    places.
    """
    tail = ranges.read(file.name, max(0, file.size - _TAIL), min(_TAIL, file.size))
    try:
        archive = zipfile.ZipFile(_Ranged(ranges, file, tail))
    except zipfile.BadZipFile as error:
        raise ValueError(
            "it is no zip file, as torch.save has written since version 1.6, and single tensors "
            "cannot be read from "
            "it. Load it and save it as safetensors"
        ) from error
    records = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    stored = _Places(io.BytesIO(archive.read(records["data.pkl"]))).load()
    stored = stored.get("state_dict", stored)
    found = {}
    for name, tensor in stored.items():
        if isinstance(tensor, tuple) and len(tensor) == 4 and isinstance(tensor[0], _Storage):
            storage, offset, shape, stride = tensor
            is_in_order = stride == tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
            if storage.dtype is not None and is_in_order:
                at = records[f"data/{storage.key}"].header_offset
                found[name] = StoredTensor(
                    file.name, offset * storage.dtype.itemsize, shape, storage.dtype, at
                )
    return found


class _Storage(NamedTuple):
    key: str
    dtype: torch.dtype | None  # None of numbers that are not floating point


class _Places(pickle.Unpickler):
    """Reads the places of tensors out of a pickle, and runs nothing of it: a class that it names is
    only a name.
    """

    def find_class(self, module: str, name: str) -> Any:
        """A stand-in for a class or function."""
        if module == "torch" and name.endswith("Storage"):
            return _STORAGES.get(name)
        return _ALLOWED.get((module, name), _Unknown)

    def persistent_load(self, entry: Any) -> _Storage:
        """The storage of a tensor."""
        _, dtype, key, *_ = entry
        return _Storage(key, dtype)


class _Unknown(dict[Any, Any]):
    """Stands for an object of any class that is not a tensor."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, _: Any) -> None:
        pass


class _Ranged(io.RawIOBase):
    """A file of which ranges are read, as a file; its end is there already."""

    def __init__(self, ranges: WeightRanges, file: StoredFile, tail: bytes) -> None:
        self._ranges = ranges
        self._file = file
        self._tail = tail
        self._at = 0

    def seekable(self) -> bool:
        """True."""
        return True

    def readable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The position in the file."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position."""
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Bytes from the position on."""
        left = self._file.size - self._at
        size = left if size < 0 else min(size, left)
        first = self._file.size - len(self._tail)
        if self._at >= first:
            data = self._tail[self._at - first : self._at - first + size]
        else:
            data = self._ranges.read(self._file.name, self._at, size)
        self._at += len(data)
        return data
