"""The metrics of a sweep: from what was asked for to what makes those of a layer."""

from dataclasses import fields
from functools import partial
from inspect import Parameter, signature
from typing import Any

from embedgeo.checkpoints.naming import import_named
from embedgeo.metrics import TokenMoments, auto_metrics
from embedgeo.metrics.checks import require_distinct_keys, require_samples
from embedgeo.metrics.extra import require_extra_names
from embedgeo.metrics.layer import MetricFactory
from embedgeo.results.wording import listed, reason
from embedgeo.sweep.settings import SweepSettings

_OPTIONS = (
    *("count_range", "spectrum", "discard_fraction", "id_batches", "anisotropy_batch", "after_processing"),
    *("max_state_bytes", "extra"),
)
"""Settings that are arguments of what makes the metrics, if they are not at their defaults."""


def metric_factory(settings: SweepSettings) -> MetricFactory:
    """What makes the metrics of a layer, given its width: the function named by ``metrics``, with its options.

    ``auto`` is `embedgeo.auto_metrics`.

    Raises:
        ValueError: there is no such function, it does not take one of the options, or it does not make metrics.
    """
    name = settings.metrics
    try:
        function: Any = auto_metrics if name == "auto" else import_named(name)
        if not callable(function):
            raise TypeError(f"it is a {type(function).__name__}")
    except (Exception, SystemExit) as error:
        raise ValueError(
            "metrics must name a function of a layer's width as package.function, in a module that can be imported; "
            f"got {name!r} ({reason(error)})."
        ) from error
    given = _given(settings)
    if function is auto_metrics and settings.jackknife:
        given["jackknife"] = settings.jackknife
    if refused := [option for option in given if not _takes(function, option)]:
        raise ValueError(
            f"metrics must name a function that takes the options given with it; {name} does not take "
            f"{listed(refused)}. Leave that out, or name a function that takes it."
        )
    make = partial(function, **given)
    try:
        require_distinct_keys(make)
    except (Exception, SystemExit) as error:
        if str(getattr(function, "__module__", "")).startswith("embedgeo."):  # one of one's own may have other names
            require_extra_names(given.get("extra", []))
        raise ValueError(
            "metrics must name a function that makes a list of torchmetrics metrics, of distinct keys, for any width; "
            f"{name} fails for width 2 ({reason(error)})."
        ) from error
    if settings.token_tables and not any(isinstance(metric, TokenMoments) for metric in make(2)):
        raise ValueError(f"token_tables needs metrics that hold TokenMoments; {name} makes none. Leave it out.")
    if settings.save_samples:
        require_samples(make)
    return make


def _given(settings: SweepSettings) -> dict[str, Any]:
    """The options that are not at their defaults: those of a function may be others."""
    defaults = {field.name: field.default for field in fields(settings)}
    values = {option: getattr(settings, option) for option in _OPTIONS}
    values |= {"count_range": tuple(settings.count_range), "extra": tuple(settings.extra_names)}
    return {option: value for option, value in values.items() if value != defaults[option]}


def _takes(function: Any, option: str) -> bool:
    parameters = signature(function).parameters
    return option in parameters or any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())
