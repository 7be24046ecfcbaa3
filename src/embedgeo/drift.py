"""How far the same rows have moved: from measurement to measurement, or from checkpoint to
checkpoint.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.precision import state_device
from embedgeo.results.records import Record, block_means
from embedgeo.results.samples import LayerSample, read_sample, sample_file

if TYPE_CHECKING:
    from embedgeo.geometry import Geometry

MOST_ROWS = 1024
"""The most rows of a layer that are compared."""

_ROUNDING = 1e-13  # a smaller share of a number cannot be told from rounding


def debiased_cka(x: Tensor, y: Tensor) -> Tensor:
    """Linear CKA from unbiased estimates of HSIC.

    It is near 0 for independent rows, and 1 for rotated and scaled copies. K = XXᵀ and L = YYᵀ have
    their diagonals set to 0. HSIC(K, L) = (tr KL + 1ᵀK1 1ᵀL1 / ((n - 1)(n - 2)) - 2 1ᵀKL1 / (n -
    2)) / (n (n - 3)), and CKA = HSIC(K, L) / √(HSIC(K, K) HSIC(L, L)).

    Sources: Song et al. 2012 (equation 5) for HSIC; Kornblith et al. 2019 for CKA; Murphy et al.
    2024 for their union.

    Args:
        x: shape (n, d1), any floating dtype. Rows with a NaN or Inf, here or in ``y``, are left
            out.
        y: the same rows as ``x``, shape (n, d2).

    Returns:
        Scalar in [-1, 1], float64. It is NaN for n < 4, and where the rows of ``x`` or of ``y`` do
        not differ.

    Raises:
        ValueError: ``x`` and ``y`` are not two matrices of as many rows.

    >>> x = torch.tensor([[0.0], [1.0], [2.0], [4.0], [8.0]])
    >>> round(float(debiased_cka(x, 3 * x - 1)), 6)
    1.0
    """
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
        raise ValueError(
            "x and y must be the same rows, shapes (n, d1) and (n, d2); got "
            f"{tuple(x.shape)} and {tuple(y.shape)}. Take the rows that both have."
        )
    finite = x.isfinite().all(1) & y.isfinite().all(1)
    return torch.dot(_centered_products(x[finite]), _centered_products(y[finite]))


def _centered_products(x: Tensor) -> Tensor:
    """The centred products of rows, flat and of norm 1; their dot product with others' is CKA."""
    n = len(x)
    x = x.detach().to(state_device(x.device)).to(torch.float64)
    if n < 4 or not x.numel():
        return x.new_full((n * n or 1,), torch.nan)
    centered = x - x.mean(0)
    # a coordinate that differs by no more than rounding does is constant
    is_constant = centered.abs().amax(0) <= _ROUNDING * x.abs().amax(0)
    centered = centered.masked_fill(is_constant, 0)
    centered = centered / torch.linalg.matrix_norm(centered)
    products = (centered @ centered.T).fill_diagonal_(0)
    sums = products.sum(0) / (n - 2)
    products = products - sums - sums[:, None] + sums.sum() / (n - 1)
    products = products.fill_diagonal_(0).flatten()
    norm = torch.linalg.vector_norm(products)
    return products / torch.where(norm > _ROUNDING, norm, torch.nan)


class _Rows(NamedTuple):
    """The rows of a layer that are compared, by their numbers, ascending."""

    rows: Tensor
    row_numbers: Tensor
    token_ids: Tensor | None

    @classmethod
    def of(cls, sample: LayerSample) -> "_Rows":
        """The first rows of a sample."""
        assert sample.rows is not None
        assert sample.row_numbers is not None
        order = sample.row_numbers[:MOST_ROWS].argsort()
        ids = None if sample.token_ids is None else sample.token_ids[order].cpu()
        return cls(sample.rows[order].cpu(), sample.row_numbers[order].cpu(), ids)

    def shared(self, other: "_Rows") -> tuple[Tensor, Tensor] | None:
        """The rows that both have; None where the rows are of other tokens."""
        here = torch.isin(self.row_numbers, other.row_numbers)
        there = torch.isin(other.row_numbers, self.row_numbers)
        if 2 * int(here.sum()) < min(len(here), len(there)):
            return None
        if (
            self.token_ids is not None
            and other.token_ids is not None
            and not torch.equal(self.token_ids[here], other.token_ids[there])
        ):
            return None
        return self.rows[here], other.rows[there]


class Drift:
    """Listener of a monitor with a probe: how far the rows of each layer have moved.

    It adds ``cka_to_previous`` and ``cka_to_first`` to the history, for each layer and as means
    over blocks. They are `debiased_cka` of the same rows here and at the measurement before, or at
    the first one. The first measurement has neither. The rows are the first 1,024 that
    `embedgeo.IntrinsicDimension` samples; where no metric samples rows, one warning says so.

    Rows are aligned by their number. Where the token ids of these change, one warning says so, and
    comparing begins again. References are kept on the host. The monitor's checkpoints hold them, so
    that a resumed run goes on from there.

    Example::

        monitor = GeometryMonitor(every_n_steps=100, probe=loader, listeners=[Drift()])
    """

    needs_probe = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Drop the rows of earlier measurements: another run begins."""
        self._earlier: dict[str, dict[str, _Rows]] = {"previous": {}, "first": {}}
        self._has_warned = False

    def __call__(self, step: int, records: Sequence[Record], geometry: "Geometry") -> list[Record]:
        """Compare the sampled rows with the earlier ones, and return the records to add."""
        now = {layer: _Rows.of(sample) for layer, sample in geometry.samples().items()}
        if not now:
            self._warn(
                "Drift compares the rows that a metric samples; no metric does. Add "
                "embedgeo.IntrinsicDimension to metrics=."
            )
        previous, first = self._earlier.values()
        changed = [
            layer
            for layer, rows in now.items()
            if layer in previous and rows.shared(previous[layer]) is None
        ]
        if changed:
            previous.clear()
            first.clear()
            self._warn(
                f"Drift compares the same rows at every measurement; at step {step} layer "
                f"{changed[0]!r} has rows of other tokens, and comparing begins again. Give a "
                "probe of fixed batches (shuffle=False)."
            )
        indices = {each["layer"]: each["layer_index"] for each in records}
        added = list[Record]()
        for layer, rows in now.items():
            earlier = {name: kept.get(layer) for name, kept in self._earlier.items()}
            added += drift_records(layer, indices[layer], rows, earlier, geometry.device)
        self._earlier = {"previous": previous | now, "first": now | first}
        return [*added, *block_means(added)]

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(message, stacklevel=2)

    def state_dict(self) -> dict[str, Any]:
        """The rows of the first and of the last measurement."""
        return {
            name: tuple((layer, *rows) for layer, rows in kept.items())
            for name, kept in self._earlier.items()
        }

    def load_state_dict(self, state: Mapping[str, Sequence[Any]]) -> None:
        """Go on from what `state_dict` has returned."""
        self._earlier = {
            name: {layer: _Rows(*rows) for layer, *rows in state[name]} for name in self._earlier
        }


def drift_records(
    layer: str,
    layer_index: int,
    rows: _Rows,
    earlier: Mapping[str, _Rows | None],
    device: torch.device | None = None,
) -> list[Record]:
    """Records of the CKA of the rows of a layer to earlier ones, by the names of these."""
    records = list[Record]()
    for name, other in earlier.items():
        shared = None if other is None else rows.shared(other)
        if shared is not None:
            here, there = (each.to(device) for each in shared)
            records.append(
                Record(
                    layer=layer,
                    layer_index=layer_index,
                    width=here.shape[1],
                    metric=f"cka_to_{name}",
                    value=float(debiased_cka(here, there)),
                    stderr=math.nan,
                )
            )
    return records


def compare_samples(path: Path) -> tuple[int, int]:
    """Compare the saved rows of each checkpoint of a sweep with those of the one before and of the
    first one.

    It writes ``drift/<name>.parquet`` a checkpoint at a time, and then ``metrics.csv`` and
    ``tensorboard/``. What is there already, of the same samples, is not computed again.

    Returns:
        The number of checkpoints that were compared now, and the number of all.

    Raises:
        ValueError: no two checkpoints have saved rows of the same tokens.
    """
    from embedgeo.results.files import remove_leftovers
    from embedgeo.results.folder import SweepFolder, drift_file
    from embedgeo.results.parquet import (
        RECORD_COLUMNS,
        SCHEMA,
        read_metadata,
        to_frame,
        write_parquet,
    )

    folder = SweepFolder(path)
    remove_leftovers(path, drift_file(path, "").parent)
    num_new = 0
    num_all = 0
    is_any_compared = False
    for checkpoints in folder.runs().values():
        names = folder.with_samples(checkpoints)
        for previous, name in pairwise(names):
            num_all += 1
            others = {"previous": previous, "first": names[0]}
            used = [name, *others.values()]
            origin = folder.origin(used)
            file = drift_file(path, name)
            if file.exists() and read_metadata(file).items() >= origin.items():
                is_any_compared = True
                continue
            samples = {each: _read(path, each) for each in used}
            measured = folder.read(name)
            indices = measured.drop_duplicates("layer").set_index("layer")["layer_index"]
            records = list[Record]()
            for layer, rows in samples[name].items():
                earlier = {key: samples[other].get(layer) for key, other in others.items()}
                records += drift_records(layer, int(indices[layer]), rows, earlier)
            if not records:
                file.unlink(missing_ok=True)  # of earlier samples
                print(f"{name}: not compared, no layer has rows of the tokens of {previous}")
                continue
            is_any_compared = True
            first = measured.iloc[0].drop([*RECORD_COLUMNS])
            shared = {str(key): value for key, value in first.items()}
            write_parquet(file, to_frame(records, **shared), SCHEMA, origin)
            num_new += 1
            means = [f"{each['metric']} {each['value']:.4g}" for each in block_means(records)]
            print(", ".join([name, *means]))
    if not is_any_compared:
        raise ValueError(
            f"drift takes the folder of a sweep with saved rows of several steps, of the same "
            f"tokens; {path} has none. Sweep with --save-samples true and metrics with "
            "IntrinsicDimension, as the default ones, into another folder."
        )
    folder.rebuild()
    return num_new, num_all


def _read(path: Path, name: str) -> dict[str, _Rows]:
    layers = read_sample(sample_file(path, name), MOST_ROWS).layers
    return {
        layer: _Rows.of(sample)
        for layer, sample in layers.items()
        if sample.rows is not None and len(sample.rows)
    }
