"""What studies draw in a report, beside the figures of metrics."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from embedgeo.report.page import Section, of_each
from embedgeo.studies.ablation_figures import ABLATION_TEXT, ablation_figures
from embedgeo.studies.ledger import LEDGER_TEXT, ledger_figures
from embedgeo.studies.processing import processing_figures
from embedgeo.studies.reference import reference_section
from embedgeo.studies.scales import SCALES_TEXT, scale_figures
from embedgeo.studies.token_types import WORDS_TEXT, token_section, word_figures
from embedgeo.studies.variance import (
    COORDINATES_TEXT,
    SPECTRA_TEXT,
    coordinate_figures,
    spectra_figures,
)


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
    spectra = of_each(partial(spectra_figures, most_layers=layers))
    words = of_each(partial(word_figures, most_layers=layers))
    return [
        *([reference_section(reference)] if reference else []),
        Section("Intrinsic dimension over scales", of_each(scale_figures), SCALES_TEXT),
        Section("Who writes it", of_each(ledger_figures), LEDGER_TEXT),
        Section("What the loss needs", of_each(ablation_figures), ABLATION_TEXT),
        Section("After-processing", of_each(processing_figures)),
        Section("Spectrum", spectra, SPECTRA_TEXT),
        token_section(names, layers),
        Section("Words", words, WORDS_TEXT),
        Section("Outlier coordinates", of_each(coordinate_figures), COORDINATES_TEXT),
    ]
