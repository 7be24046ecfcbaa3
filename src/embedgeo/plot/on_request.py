"""The figures of what is measured on request: spectra, dimension over scales, similarity of steps and of layers."""

from functools import partial
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from embedgeo.plot.given import Results, chosen_run, drawn, metrics_of, require_known
from embedgeo.report import drift, spectra
from embedgeo.report import scales as scale_figures
from embedgeo.report.reading import with_baseline


def spectrum(
    results: Results,
    layer: str | None = None,
    *,
    ax: Axes | None = None,
    run: str | None = None,
    model: str | None = None,
) -> Figure:
    """The eigenvalues of the covariance in descending order, beside those of random embeddings and their edge.

    Args:
        results: a `Geometry` with ``Anisotropy(spectrum=True)``, or a folder with spectra (``--spectrum true``).
        layer: a line for each step at this layer; default: a line for each layer at the last step.
        ax: axes to draw into; default: a new figure.
        run: which run, where there are several: its name.
        model: which model, where there are several.

    Raises:
        TypeError, ValueError, FileNotFoundError: as `dynamics` does; there are no spectra, or not of this layer.
    """
    chosen = chosen_run(results, run, model, spectra=True)
    if not chosen.spectra:
        raise ValueError(
            "spectrum needs all eigenvalues: a Geometry with Anisotropy(spectrum=True), or a folder with spectra/ "
            "(--spectrum true); there are none."
        )
    if layer is None:
        return drawn(partial(spectra.by_layer, chosen), ax)
    require_known("layer", layer, [x for x in chosen.depth if x in set(chosen.spectra[max(chosen.spectra)]["layer"])])
    return drawn(partial(spectra.by_step, chosen, [layer]), ax)


def scales(
    results: Results,
    by: Literal["layer", "step"] = "layer",
    *,
    ax: Axes | None = None,
    run: str | None = None,
    model: str | None = None,
) -> Figure:
    """The intrinsic dimension against the scale at which it is measured; other arguments as of `dynamics`.

    Args:
        results: what was measured: see `embedgeo.plot`; with ``IntrinsicDimension(estimator="gride")``.
        by: a line for each ``"layer"``, at the last step; or for each ``"step"``, averaged over blocks.
        ax: axes to draw into; default: a new figure.
        run: which run, where there are several: its name.
        model: which model, where there are several.

    Raises:
        TypeError, ValueError, FileNotFoundError: as `dynamics` does; the dimension was not measured at scales.
    """
    require_known("by", by, ["layer", "step"])
    chosen = chosen_run(results, run, model)
    if not scale_figures.measured_scales(chosen):
        raise ValueError(
            'scales needs the intrinsic dimension at several scales, as IntrinsicDimension(estimator="gride") has it '
            f"(--extra scales); there are {metrics_of(chosen)}."
        )
    draw = scale_figures.by_layer if by == "layer" else scale_figures.by_step
    return drawn(partial(draw, with_baseline(chosen)), ax)


def similarity(
    results: Results,
    layer: str | None = None,
    *,
    step: int | None = None,
    ax: Axes | None = None,
    run: str | None = None,
    model: str | None = None,
) -> Figure:
    """Debiased linear CKA as a square of colours: of layers with layers at a step, or of steps with steps at a layer.

    Args:
        results: a folder in which ``embedgeo drift`` has compared the saved rows of a sweep.
        layer: which layer, for steps with steps.
        step: which step, for layers with layers; default: the last one compared.
        ax: axes to draw into; default: a new figure.
        run: which run, where there are several: its name.
        model: which model, where there are several.

    Raises:
        TypeError, ValueError, FileNotFoundError: as `dynamics` does; nothing was compared, or not there.
    """
    if layer is not None and step is not None:
        raise ValueError(f"similarity is of one layer or of one step; got layer={layer!r} and step={step!r}.")
    chosen = chosen_run(results, run, model)
    if chosen.cka.empty:
        raise ValueError(
            "similarity needs rows that were compared: a folder of a sweep with --save-samples true, and embedgeo "
            "drift on it; there are none."
        )
    if layer is not None:
        require_known("layer", layer, drift.layers_over_steps(chosen))
        return drawn(partial(drift.cka_of_steps, chosen, layer), ax)
    steps = drift.steps_over_layers(chosen)
    if step is not None or not steps:
        require_known("step", step, steps)
    return drawn(partial(drift.cka_of_layers, chosen, max(steps) if step is None else step), ax)
