"""Groups of models, such as encoders and decoders, by which comparisons tell them apart."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any


def parse_groups(given: Any) -> dict[str, str]:
    """The group of each model that is named in options.

    Args:
        given: a mapping from a group to its models; or ``group=model,model`` as a string, several with spaces between
            them, or a list of these. Nothing, if there are no groups.

    Raises:
        ValueError: neither of these, a group without models, or a model in two groups.

    >>> parse_groups(["encoder=a,b", "decoder=c"]) == parse_groups({"encoder": ["a", "b"], "decoder": "c"})
    True
    >>> parse_groups("encoder=a,b decoder=c")
    {'a': 'encoder', 'b': 'encoder', 'c': 'decoder'}
    """
    if isinstance(given, Mapping):
        named = [(group, [models] if isinstance(models, str) else models) for group, models in given.items()]
    else:
        listed = given if isinstance(given, list | tuple) else [given] if given else []
        words = [word for each in listed for word in str(each).split()]
        named = [(group, models.split(",")) for group, _, models in (word.partition("=") for word in words)]
    groups: dict[str, str] = {}
    for group, models in named:
        are_names = isinstance(models, list | tuple) and models and all(isinstance(m, str) and m for m in models)
        if not (isinstance(group, str) and group and are_names):
            raise ValueError(
                "model_group must be groups with their models, as encoder=a,b decoder=c, or in YAML a mapping from a "
                f"group to a list of models; got {given!r}."
            )
        for model in models:
            if groups.setdefault(model, group) != group:
                raise ValueError(f"a model must be in one model_group; {model} is in {groups[model]} and in {group}.")
    return groups


def groups_of(groups: Mapping[str, str], models: Iterable[str]) -> dict[str, str]:
    """The group of each of these models that is in one.

    Args:
        groups: as `parse_groups` has them, by the name of a model, by what follows the last slash of it if only one
            of the models has that, or by a pattern.
        models: names of repositories or folders.

    Raises:
        ValueError: a name of none or of several of the models, or a model in two groups.

    >>> groups_of({"bert": "encoder", "lab/gpt-*": "decoder"}, ["google/bert", "lab/gpt-1", "lab/gpt-2", "lab/t5"])
    {'google/bert': 'encoder', 'lab/gpt-1': 'decoder', 'lab/gpt-2': 'decoder'}
    """
    known = list(dict.fromkeys(models))
    found: dict[str, str] = {}
    for name, group in groups.items():
        matches = [model for model in known if model == name or fnmatchcase(model, name)]
        if not matches:
            matches = [model for model in known if Path(model).name == name]
            if len(matches) != 1:
                which = f"is that of {', '.join(matches)}" if matches else f"is none of {', '.join(known)}"
                raise ValueError(f"model_group must name models that are there; {name} {which}.")
        for model in matches:
            if found.setdefault(model, group) != group:
                raise ValueError(f"a model must be in one model_group; {model} is in {found[model]} and in {group}.")
    return found
