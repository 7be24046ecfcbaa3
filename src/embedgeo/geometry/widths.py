"""What a layer's width decides about its metrics, in words: for the start of a run, of a sweep, and for the doctor."""

from collections.abc import Iterator, Mapping

from embedgeo.metrics.auto import left_out, sketched
from embedgeo.metrics.layer import MetricFactory
from embedgeo.results.wording import size


def choices(make: MetricFactory, width: int) -> Iterator[str]:
    """A line for what is left out at a width, and one for what a sketch is in place of; none where nothing is."""
    if missing := left_out(make, width):
        yield too_large(missing, width)
    if held := sketched(make, width):
        yield in_a_sketch(*held, width)


def too_large(missing: Mapping[str, int], width: int) -> str:
    """What ``metrics="auto"`` leaves out at a width, and what to do to have it.

    >>> too_large({"IntrinsicDimension": 268_436_000}, 16384)
    'metrics="auto" leaves out IntrinsicDimension (268 MB) at layers of width 16384. To have it raise max_state_bytes.'
    """
    names = [f"{name} ({size(num_bytes)})" for name, num_bytes in missing.items()]
    pronoun = "it" if len(names) == 1 else "them"
    moments = ", with EmbeddingMoments in place of TokenMoments" if "TokenMoments" in missing else ""
    return (
        f'metrics="auto" leaves out {", ".join(names)} at layers of width {width}{moments}. To have {pronoun} raise '
        "max_state_bytes."
    )


def in_a_sketch(num_bytes: int, of_scatter: int, width: int) -> str:
    """That the anisotropy comes from a sketch at a width, and what to do to have it from the scatter."""
    return (
        f"Anisotropy holds a sketch ({size(num_bytes)}) at layers of width {width}, not the scatter "
        f"({size(of_scatter)}): anisotropy_error says how far off it may be, anisotropy_standardized is absent. To "
        "have the scatter raise max_state_bytes."
    )
