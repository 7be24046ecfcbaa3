"""Metrics over the forward passes of a model in plain PyTorch."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn

from embedgeo.capture.forward_inputs import Given
from embedgeo.capture.layers import LayerSpec
from embedgeo.functional.rows import RowUnit
from embedgeo.geometry.layers import Geometry
from embedgeo.metrics import MAX_STATE_BYTES
from embedgeo.metrics.layer import MetricFactory


@contextmanager
def observe(
    model: nn.Module,
    layers: LayerSpec = "blocks",
    metrics: MetricFactory | Literal["auto"] | None = None,
    skip_first_positions: int = 0,
    ignore_token_ids: Sequence[int] = (),
    rows: RowUnit = "tokens",
    *,
    token_ids: Given | None = None,
    mask: Given | None = None,
    word_ids: Given | None = None,
    no_grad_passes: bool = True,
    jackknife: int = 0,
    max_state_bytes: float = MAX_STATE_BYTES,
) -> Iterator[Geometry]:
    """Measure the geometry of the hidden states of the forward passes that run inside.

    Args:
        model: any module.
        layers: ``"blocks"``, ``"hidden_states"``, a pattern of names, a list of these or a callable on the model: see
            `embedgeo.capture.layers.resolve_layers`.
        metrics: makes the metrics of a layer, given the layer's width; default: `embedgeo.default_metrics`; ``"auto"``:
            those of them that ``max_state_bytes`` leaves room for, see `embedgeo.auto_metrics`.
        skip_first_positions: leave out this many real positions at the start of every sequence.
        ignore_token_ids: leave out these token ids.
        rows: what a row is: a token (``"tokens"``), or a sequence, by the ``"mean"``, the ``"max"`` (in each
            coordinate), the ``"first"`` or the ``"last"`` of its tokens that count. Means and maxima have no token ids:
            the metrics that need them are absent. Or a word (``"words"``), by the mean of its tokens that count; words
            of the same token ids are a token type. Averaging makes norms smaller, the more so the more tokens a word
            has, and rare words have more: do not compare Q, M and V of words of different lengths (Yamagiwa &
            Shimodaira 2025, appendix J).
        token_ids: the token ids, or a function that returns those of a batch; default: those that the input embedding
            is called with. The batch is what the model is called with: its only argument, as in ``model(batch)``, or
            a dict of its arguments by name, as in ``model(**batch)``.
        mask: the mask (True = count), or a function that returns that of a batch; default: the attention mask that the
            model is called with.
        word_ids: for words, the number of each token's word within its sequence, -1 for tokens of no word, or a
            function that returns those of a batch; a tokenizer's ``word_ids()`` has them. ``token_ids`` are then the
            types of the words, of which a word's first token has it; ``ignore_token_ids`` are still tokens.
        no_grad_passes: whether forward passes without gradients count; see `embedgeo.GeometryMonitor`.
        jackknife: G, the number of groups of whole sequences for standard errors (16 is a good choice), which needs
            up to G + 1 times the memory; 0: there are none.
        max_state_bytes: what the metrics of a layer may hold together with ``metrics="auto"``; else what its scatter
            may take, above which the default metrics have a sketch: see `embedgeo.default_metrics`.

    Yields:
        Geometry: its ``compute()`` returns ``{layer: {metric: float}}``, its ``to_frame()`` a table.

    Raises:
        TypeError, ValueError: as `Geometry` does.

    >>> import torch
    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    >>> with observe(model, layers="1") as geometry:
    ...     _ = model(torch.tensor([[1, 2, 3, 1]]))
    >>> geometry.compute()["01"]["n"]
    4.0
    """
    options: dict[str, Any] = {"rows": rows, "token_ids": token_ids, "mask": mask, "word_ids": word_ids}
    options |= {"no_grad_passes": no_grad_passes, "jackknife": jackknife, "max_state_bytes": max_state_bytes}
    geometry = Geometry(model, layers, metrics, skip_first_positions, ignore_token_ids, **options)
    with geometry.probe:
        yield geometry
    if why := geometry.why_silent():
        warnings.warn(f"{why[0].upper()}{why[1:]} Nothing was measured there.", stacklevel=3)
