"""What studies draw in a report, beside the figures of metrics."""

from collections.abc import Sequence
from pathlib import Path

from embedgeo.report.page import Section
from embedgeo.studies.ablation_figures import ablation_section
from embedgeo.studies.ledger import ledger_section
from embedgeo.studies.processing import processing_section
from embedgeo.studies.reference import reference_section
from embedgeo.studies.scales import scales_section
from embedgeo.studies.similarity import similarity_section
from embedgeo.studies.token_types import token_section, words_section
from embedgeo.studies.variance import variance_sections


def report_sections(
    names: Sequence[str] | None = None, reference: Sequence[Path] = (), layers: int = 4
) -> list[Section]:
    """The sections of all studies, for `embedgeo.report.write_report`.

    Args:
        names: texts of token types whose Q, M and V are listed; none of them: some of every
            frequency.
        reference: folders of earlier runs, whose range stands behind those of the report.
        layers: at how many of them, at most, token types, spectra and coordinates are drawn.
    """
    if layers < 1:
        raise ValueError(f"layers must be at least 1 to draw at; got {layers}.")
    spectra, coordinates = variance_sections(layers)
    return [
        *([reference_section(reference)] if reference else []),
        scales_section(),
        ledger_section(),
        ablation_section(),
        processing_section(),
        spectra,
        similarity_section(),
        token_section(names, layers),
        words_section(layers),
        coordinates,
    ]
