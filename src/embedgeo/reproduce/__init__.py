"""Reproductions of papers: what they print, beside what a sweep with their preset measures."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from embedgeo.extras import require_extra
from embedgeo.presets import preset
from embedgeo.results.groups import groups_of, parse_groups
from embedgeo.sweep import SweepSettings, sweep


@dataclass(frozen=True)
class PaperSettings:
    """The options of ``embedgeo reproduce`` beside those of the sweep.

    Args:
        paper: what to compare with. The preset of this name gives the options of the sweep; those
            that are given in place of them come after it.
        claims: a YAML file of claims to compare with in place of the package's own ``papers.yaml``,
            and in its form.
    """

    paper: Literal["yamagiwa2025", "razzhigaev2024", "li2025"]
    claims: Path | None = None


def reproduce(paper: PaperSettings, settings: SweepSettings) -> int:
    """Measure as a paper did, and set what it prints beside what was measured, each with a verdict.

    It is a sweep with the preset of the paper, any of whose options can be given in place of the
    preset's. Then ``reproduce/<paper>.html`` and ``reproduce/<paper>.csv`` in the folder of the
    sweep have a row for each figure and table that the numbers speak to: what the paper prints or
    shows, what was measured, the difference with its standard error, and whether the claim holds,
    does not hold, or cannot be compared, and why. Below them are the figures of the report in
    ``reproduce/<paper>/``, which is written at the layers that the paper draws.

    Args:
        paper: which paper, and its claims.
        settings: the options of the sweep.

    Returns:
        As ``sweep`` does, which also tells what is raised.

    Raises:
        ValueError: the file of claims cannot be read, or has none of the paper.
    """
    require_extra("report,sweep", "embedgeo reproduce")
    from embedgeo.reproduce.claims import read_claims

    claims = read_claims(paper.paper, paper.claims)
    settings = _with_groups_of_these(settings, paper.paper)
    status = sweep(settings)
    if settings.dry_run:
        return status
    from embedgeo.reproduce.command import write_comparison

    write_comparison(claims, settings)
    return status


def _with_groups_of_these(settings: SweepSettings, name: str) -> SweepSettings:
    """The settings without those models in the preset's groups that are not measured here."""
    asked = preset(name).get("model_group", ())
    if settings.model_group != asked:
        return settings
    groups: dict[str, list[str]] = {}
    for model, group in parse_groups(asked).items():
        try:
            groups_of({model: group}, settings.models)
        except ValueError:  # it is none of them
            continue
        groups.setdefault(group, []).append(model)
    return replace(settings, model_group=groups or ())
