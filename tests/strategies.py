"""Hypothesis strategies: seeds, and splits of rows."""

from hypothesis import strategies as st

seeds = st.integers(0, 2**31)


@st.composite
def splits(draw, n):
    """Consecutive slices, some of them empty, that cover n rows."""
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=6)))
    return [slice(a, b) for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
