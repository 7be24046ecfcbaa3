"""Options of the commands: the arguments of what they set, with the docstrings as help."""

import re
import sys
from argparse import SUPPRESS, Action, ArgumentError
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any, NoReturn, get_args

from docstring_parser import parse
from jsonargparse import (  # type: ignore[attr-defined]  # its __all__ is made later
    ActionConfigFile as Configuration,
    ActionYesNo,
    ArgumentParser,
)

from embedgeo import __version__
from embedgeo.presets import preset_file, preset_files
from embedgeo.sweep import SweepSettings
from embedgeo.sweep.settings import SPECIAL, choices_of

_POSITIONAL = {
    "dirs": "DIR",
    "folder": "DIR",
    "source": "MODEL",
    "name": "NAME",
}  # as the help calls them


class _CommandLineValues(list[Any]):
    """Values given on the command line, not in a configuration or by default."""


def _several(read: Callable[[str], list[Any]]) -> type[Action]:
    """An action that takes several values: ``--text a b`` or ``--text a --text b``."""

    class Several(Action):
        def __call__(
            self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
        ) -> None:
            earlier = getattr(namespace, self.dest, None)
            values_so_far = _CommandLineValues(
                earlier if isinstance(earlier, _CommandLineValues) else ()
            )
            for value in values:
                try:
                    values_so_far += read(value)
                except ValueError as error:
                    raise ArgumentError(self, str(error)) from None
            setattr(namespace, self.dest, values_so_far)

    return Several


def _numbers(value: str) -> list[Any]:
    try:
        return [value] if value == SPECIAL else [int(i) for i in value.split(",")]
    except ValueError:
        raise ValueError(f"must be whole numbers, as 0 1 or 0,1; got {value!r}") from None


class _Parser(ArgumentParser):
    commands: dict[str, "_Parser"]

    def options_in(self, namespace: Any) -> list[str]:
        """The options that have another value than their default."""
        named = [action for action in self._actions if action.option_strings]
        changed = [
            action
            for action in named
            if getattr(namespace, action.dest, action.default) != action.default
        ]
        return [action.option_strings[0] for action in changed]

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """One line that names the rule, and which command lists its options."""
        of_command = getattr(ex, "subcommand_parser", None) or self
        # names of a command and its argument
        if missing := re.search(r"are required: ((\w+)\..*)", message):
            of_command = self.commands[missing[2]]
            names = [
                _option(name.removeprefix(f"{missing[2]}.")) for name in missing[1].split(", ")
            ]
            message = f"the following arguments are required: {', '.join(names)}"
        asked = f"{of_command.prog.replace(' [options]', '')} --help"
        message = re.sub(
            r'Parser key "(\w+)":', lambda match: f"argument {_option(match[1])}:", message
        )
        print(
            f"embedgeo: error: {' '.join(message.split())} ({asked} lists the options)",
            file=sys.stderr,
        )
        raise SystemExit(2)


class _Preset(Action):
    """The name of a preset, which gives options as a configuration does: those after it take their
    place.
    """

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        if given := parser.options_in(namespace):
            raise ArgumentError(
                self, f"comes first, and options after it; got {given[0]} before {values}"
            )
        try:
            path = preset_file(values)
        except ValueError as error:
            raise ArgumentError(self, str(error)) from None
        Configuration.apply_config(parser, namespace, "config", str(path))


def make_parser(
    summary: str, commands: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]]
) -> ArgumentParser:
    """The parser of ``embedgeo``: of each command, what it runs, and whose arguments are its
    options.
    """
    parser = _Parser(prog="embedgeo", description=summary, allow_abbrev=True, version=__version__)
    parser.commands = {}
    subcommands = parser.add_subcommands(required=True)
    for name, (run, settings) in commands.items():
        arguments = signature(settings).parameters
        described = parse(run.__doc__ or "")
        command = _Parser(description=_plain(described.description, arguments), allow_abbrev=True)
        command.add_argument("--config", action="config", help="a YAML file of these options")
        if settings is SweepSettings:
            named = f"a preset, which options after it change: {', '.join(preset_files())}"
            command.add_argument(
                "--preset", metavar="NAME", action=_Preset, default=SUPPRESS, help=named
            )
        _add_options(command, settings)
        parser.commands[name] = command
        subcommands.add_subcommand(
            name, command, help=_plain(described.short_description, arguments)
        )
    return parser


def _option(argument: str) -> str:
    """An argument as it is written on the command line."""
    return _POSITIONAL.get(argument) or f"--{argument.replace('_', '-')}"


def _plain(text: str | None, arguments: Collection[str]) -> str:
    """A text of a docstring without its marks of code, in which these arguments are named as
    options.
    """
    return re.sub(
        r"``?([^`]+)``?",
        lambda code: _option(code[1]) if code[1] in arguments else code[1],
        text or "",
    )


def _add_options(parser: ArgumentParser, settings: Callable[..., Any]) -> None:
    """An option for each argument, with its type, default and description; those of `_POSITIONAL`
    by position. What has no default is required.
    """
    arguments = signature(settings, eval_str=True).parameters
    described = {
        argument.arg_name: _plain(argument.description, arguments)
        for argument in parse(settings.__doc__ or "").params
    }
    for name, parameter in arguments.items():
        annotation = parameter.annotation
        kinds = (annotation, *get_args(annotation))
        given: dict[str, Any] = {"type": annotation}
        if annotation is bool:
            given = {"nargs": "?", "action": ActionYesNo(no_prefix="no-")}
        elif choices := choices_of(annotation):
            given = {"choices": choices}
        elif Sequence[int] in kinds:
            given = {"nargs": "+", "action": _several(_numbers)}
        elif list[str] in kinds:
            given = {"nargs": "+", "action": _several(lambda text: [text])}
        elif bool in kinds:
            given |= {"nargs": "?", "const": True}
        flag = _option(name)
        if name in _POSITIONAL:
            flag = name
            given["metavar"] = _POSITIONAL[name]
            if parameter.default is None:
                given["nargs"] = "?"
        elif parameter.default is Parameter.empty:
            given["required"] = True
        else:
            given["default"] = parameter.default
        parser.add_argument(flag, help=described[name], **given)
