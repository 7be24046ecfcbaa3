"""Samples: rows, mean and spectrum kept of a checkpoint's embeddings, so that new numbers need no
forward pass.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedgeo.extras import require_extra
from embedgeo.formatting import listed
from embedgeo.results.files import replacing

if TYPE_CHECKING:
    from torch import Tensor

_NUMBERING = (
    "position among the rows that count (not masked), in the order in which one process sees the "
    "batches"
)
_OF_ROWS = ("rows", "row_numbers", "token_ids", "sequence_ids")
_TENSORS = (*_OF_ROWS, "mean", "eigenvalues")


@dataclass(frozen=True)
class LayerSample:
    """Facts kept of the rows at a layer; None where no metric had them.

    Attributes:
        n: number of rows that counted and were finite.
        rows: the sampled rows of `embedgeo.IntrinsicDimension`, shape (m, d), in the dtype of the
            hidden states. They are in the order in which they were drawn: the first k are a sample
            of k rows.
        row_numbers: shape (m,), int64: the position of each among the rows that counted, from 0, in
            the order in which one process sees the batches; rows with a NaN or Inf have a number,
            too.
        mean: mean of all n rows, shape (d,), float64.
        eigenvalues: those of the covariance of all n rows, shape (d,), float64, descending. Their
            sum is V.
        token_ids: their token types, shape (m,), int64, -100 of a row that has none; None without
            token ids.
        sequence_ids: equal numbers for rows of one sequence, shape (m,), int64; None where each row
            is one.
    """

    n: int
    rows: "Tensor | None" = None
    row_numbers: "Tensor | None" = None
    mean: "Tensor | None" = None
    eigenvalues: "Tensor | None" = None
    token_ids: "Tensor | None" = None
    sequence_ids: "Tensor | None" = None


@dataclass(frozen=True)
class SavedSample:
    """A saved sample of a checkpoint; its layers are in forward order."""

    model: str
    revision: str
    step: int
    layers: dict[str, LayerSample]


def sample_file(folder: Path, name: str) -> Path:
    """Path of the sample of a checkpoint in the folder of a sweep."""
    return folder / "samples" / f"{name}.safetensors"


def write_sample(
    folder: Path, name: str, sample: Mapping[str, LayerSample], checkpoint: Mapping[Any, Any]
) -> None:
    """Write `sample_file`, which holds the tensors ``<layer>/<attribute>``, whole or not at all.

    Its metadata have one entry, ``embedgeo``, in JSON: ``version`` of the schema, ``model``,
    ``revision``, ``step``, ``layers`` in forward order with their ``n``, and what ``row_numbers``
    are.
    """
    from safetensors.torch import save_file

    tensors = {}
    layers = {}
    for layer, kept in sample.items():
        layers[layer] = {"n": kept.n}
        by_key = {f"{layer}/{key}": getattr(kept, key) for key in _TENSORS}
        tensors.update(
            {key: tensor.contiguous() for key, tensor in by_key.items() if tensor is not None}
        )
    metadata = {
        "version": 1,
        "model": checkpoint["model"],
        "revision": checkpoint["revision"],
        "step": int(checkpoint["step"]),
        "layers": layers,
        "row_numbers": _NUMBERING,
    }
    with replacing(sample_file(folder, name)) as temporary:
        # one entry: several have no fixed order
        save_file(tensors, temporary, {"embedgeo": json.dumps(metadata)})


def read_sample(path: Path, most: int | None = None) -> SavedSample:
    """Read a file that `write_sample` has written, or only the first ``most`` of its rows, their
    numbers and ids.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = json.loads((file.metadata() or {})["embedgeo"])
            tensors = {
                key: file.get_slice(key)[:most]
                if key.rpartition("/")[-1] in _OF_ROWS
                else file.get_tensor(key)
                for key in set(file.keys())
            }
        layers = {
            layer: LayerSample(
                facts["n"], **{key: tensors.get(f"{layer}/{key}") for key in _TENSORS}
            )
            for layer, facts in metadata["layers"].items()
        }
        return SavedSample(metadata["model"], metadata["revision"], metadata["step"], layers)
    except (SafetensorError, LookupError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} must be a saved sample; it is none, or damaged ({error})."
        ) from error


def load_sample(folder: str | os.PathLike[str], name: str) -> SavedSample:
    """Read a saved sample: the rows, the mean and the spectrum at each layer of one checkpoint.

    ``embedgeo sweep --save-samples true`` and ``Geometry.save(…, save_samples=True)`` write them.

    Args:
        folder: of the sweep, or of `embedgeo.Geometry.save`.
        name: of the checkpoint, as that of its file in ``samples/``.

    Raises:
        FileNotFoundError: there is no such sample.
        ImportError: safetensors is not installed.
        ValueError: the file is damaged.
    """
    require_extra("report", "load_sample", "safetensors")
    file = sample_file(Path(folder), name)
    if not file.exists():
        saved = sorted(path.stem for path in file.parent.glob("[!.]*.safetensors"))
        raise FileNotFoundError(
            f"load_sample takes a checkpoint with a sample; got {name!r}, and {folder} has "
            f"{listed(saved) or 'none: sweep with --save-samples true'}."
        )
    return read_sample(file)
