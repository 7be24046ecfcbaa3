"""Groups of models, as options name them."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any


def parse_groups(option: Any) -> dict[str, str]:
    """The group of each model that is named in an option, if any.

    It is a mapping from a group to its models; or ``group=model,model`` as a string, several with
    spaces between them, or a list of these.

    >>> parse_groups(["encoder=a,b", "decoder=c"]) == parse_groups(
    ...     {"encoder": ["a", "b"], "decoder": "c"}
    ... )
    True
    >>> parse_groups("encoder=a,b decoder=c")
    {'a': 'encoder', 'b': 'encoder', 'c': 'decoder'}
    """
    if isinstance(option, Mapping):
        named = [*option.items()]
    else:
        parts = option if isinstance(option, list | tuple) else [option] if option else []
        words = [word for part in parts for word in str(part).split()]
        named = [(group, models) for group, _, models in (word.partition("=") for word in words)]
    groups: dict[str, str] = {}
    for group, given in named:
        models = given.split(",") if isinstance(given, str) else given
        if not (isinstance(models, list | tuple) and models) or not all(
            isinstance(name, str) and name for name in (group, *models)
        ):
            raise ValueError(
                "model_group must be groups with their models, as encoder=a,b decoder=c, or in "
                f"YAML a mapping from a group to a list of models; got {option!r}."
            )
        for model in models:
            _assign(groups, model, group)
    return groups


def groups_of(groups: Mapping[str, str], models: Iterable[str]) -> dict[str, str]:
    """The group of each of these models that is in one.

    `parse_groups` has them by the name of a model, by the end of it after the last slash, or by a
    pattern.

    >>> groups_of(
    ...     {"bert": "encoder", "lab/gpt-*": "decoder"},
    ...     ["google/bert", "lab/gpt-1", "lab/gpt-2", "lab/t5"],
    ... )
    {'google/bert': 'encoder', 'lab/gpt-1': 'decoder', 'lab/gpt-2': 'decoder'}
    """
    known = list(dict.fromkeys(models))
    found: dict[str, str] = {}
    for name, group in groups.items():
        matches = [
            model
            for model in known
            if name in (model, Path(model).name) or fnmatchcase(model, name)
        ]
        if not matches:
            raise ValueError(
                f"model_group must name models that are there; {name} is none of "
                f"{', '.join(known)}."
            )
        for model in matches:
            _assign(found, model, group)
    return found


def _assign(groups: dict[str, str], model: str, group: str) -> None:
    if groups.setdefault(model, group) != group:
        raise ValueError(
            f"a model must be in one model_group; {model} is in {groups[model]} and in {group}."
        )
