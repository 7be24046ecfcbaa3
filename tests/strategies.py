"""Hypothesis strategies: seeds, splits of rows, and whatever may be handed to a metric's update."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

seeds = st.integers(0, 2**31)

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.uint8]
EXTREMES = [0.0, -0.0, 1e-45, 1e-30, 1e-5, 1.0, 300.0, 6e4, 1e25, 1e200]


@st.composite
def splits(draw, n: int) -> list[slice]:
    """Consecutive slices, some of them empty, that cover n rows."""
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=6)))
    return [slice(a, b) for a, b in zip([0, *cuts], [*cuts, n], strict=True)]


class Call(NamedTuple):
    """Arguments of an update, and whether they are right (``error`` None) or which error they must
    raise.
    """

    embeddings: Tensor
    token_ids: Tensor | None
    mask: Tensor | None
    error: type[Exception] | None


@st.composite
def calls(draw, dim: int, *, with_ids: bool) -> Call:
    """Any update of a metric of width ``dim``, right or wrong in one argument."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    wrong = draw(st.sampled_from([None] * 8 + ["embeddings", "mask"] + ["token_ids"] * with_ids))
    embeddings, ids, mask, error = draw(embeddings_of(shape, dim)), None, None, None
    if with_ids:
        ids = draw(st.sampled_from(["few", "far"]))
        drawn = torch.randint(0, 4, shape, generator=_generator(draw))
        ids = drawn.to(draw(st.sampled_from(INTEGERS))) if ids == "few" else drawn * 2**40
    if draw(st.booleans()) or wrong == "mask":
        kinds = [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16]
        mask = torch.randint(0, 2, shape, generator=_generator(draw)).to(
            draw(st.sampled_from(kinds))
        )
    if wrong == "embeddings":
        embeddings, error = draw(
            st.sampled_from(
                [
                    (embeddings.float().to(torch.int32), TypeError),
                    (embeddings.float().to(torch.complex64), TypeError),
                    (embeddings.float().tolist(), TypeError),
                    (embeddings.to(torch.float8_e4m3fn), TypeError),
                    (embeddings.to(torch.float8_e5m2), TypeError),
                    (torch.zeros(*shape, dim + 1), ValueError),
                    (torch.zeros(()), ValueError),
                ]
            )
        )
    elif wrong == "token_ids":
        ids, error = draw(
            st.sampled_from(
                [
                    (ids.float(), TypeError),
                    (ids.bool(), TypeError),
                    (ids.unsqueeze(-1), ValueError),
                    (3, TypeError),
                ]
            )
        )
    elif wrong == "mask":
        mask, error = draw(
            st.sampled_from(
                [
                    (torch.cat((mask.float().flatten(), torch.tensor([0.5]))), ValueError),
                    (mask.unsqueeze(0), ValueError),
                    (mask.tolist(), TypeError),
                    *(
                        [
                            (torch.full(shape, value), ValueError)
                            for value in (-1, 2, 0.5, torch.nan)
                        ]
                        if 0 not in shape
                        else []
                    ),
                ]
            )
        )
    return Call(embeddings, ids, mask, error)


@st.composite
def embeddings_of(draw, shape: tuple[int, ...], dim: int) -> Tensor:
    """Embeddings of any float dtype, layout and scale, with some rows that are not finite."""
    x = torch.randn(*shape, dim, generator=_generator(draw), dtype=torch.float64)
    x = x * draw(st.sampled_from(EXTREMES)) + draw(st.sampled_from([0.0, 0.1, 1000.0]))
    if draw(st.booleans()):
        x = x.round()  # so that rows repeat
    if x.numel() and draw(st.booleans()):
        places = draw(st.lists(st.integers(0, x.numel() - 1), max_size=3))
        x.view(-1)[places] = draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    x = x.to(draw(st.sampled_from(FLOATS)))
    layout = draw(st.sampled_from(["contiguous", "transposed", "strided", "expanded"]))
    if layout == "transposed":
        x = x.movedim(-1, 0).contiguous().movedim(0, -1)
    elif layout == "strided":
        x = torch.stack((x, x), dim=-1)[..., 0]
    elif layout == "expanded" and shape:
        x = x[:1].expand(x.shape) if shape[0] else x
    if draw(st.booleans()) and x.dtype.itemsize > 1:
        x.requires_grad_()
    return x


def _generator(draw) -> torch.Generator:
    return torch.Generator().manual_seed(draw(seeds))
