"""What studies draw in a report, beside the figures of metrics."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from embedgeo.drawing import FigureData
from embedgeo.report.page import Section, of_each
from embedgeo.report.runs import Run
from embedgeo.report.token_types import mean_against_variance, types_of
from embedgeo.studies.ablation_figures import ABLATION_TEXT, ablation_figures
from embedgeo.studies.ledger import LEDGER_TEXT, ledger_figures
from embedgeo.studies.processing import processing_figures
from embedgeo.studies.reference import reference_section
from embedgeo.studies.scales import SCALES_TEXT, scale_figures
from embedgeo.studies.similarity import CKA_TEXT, cka_figures
from embedgeo.studies.variance import (
    COORDINATES_TEXT,
    SPECTRA_TEXT,
    coordinate_figures,
    spectra_figures,
)


def report_sections(reference: Sequence[Path] = (), layers: int = 4) -> list[Section]:
    """The sections of all studies, for `embedgeo.report.write_report`.

    Args:
        reference: folders of earlier runs, whose range stands behind those of the report.
        layers: at how many of them, at most, token types, spectra and coordinates are drawn.
    """
    if layers < 1:
        raise ValueError(f"layers must be at least 1 to draw at; got {layers}.")
    spectra = of_each(partial(spectra_figures, most_layers=layers))
    types = of_each(partial(token_figures, most_layers=layers))
    return [
        *([reference_section(reference)] if reference else []),
        Section("Intrinsic dimension over scales", of_each(scale_figures), SCALES_TEXT),
        Section("Who writes it", of_each(ledger_figures), LEDGER_TEXT),
        Section("What the loss needs", of_each(ablation_figures), ABLATION_TEXT),
        Section("After-processing", of_each(processing_figures)),
        Section("Spectrum", spectra, SPECTRA_TEXT),
        Section("The same rows over time and depth", of_each(cka_figures), CKA_TEXT),
        Section("Token types", types),
        Section("Outlier coordinates", of_each(coordinate_figures), COORDINATES_TEXT),
    ]


def token_figures(run: Run, most_layers: int) -> Iterator[FigureData]:
    """V against M of token types, where the run has a table of them."""
    if known := types_of(run, most_layers):
        yield mean_against_variance(known)
