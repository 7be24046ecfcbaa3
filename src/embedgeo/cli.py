"""The command line: options are the arguments of what they set, and their help is its docstring.

Nothing heavy is imported before a command runs, so that ``--help`` and a wrong option are answered at once.
"""

import os
import re
import signal
import sys
from argparse import Action, ArgumentError
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, NoReturn

import yaml
from docstring_parser import parse
from jsonargparse import ActionYesNo, ArgumentParser
from safetensors import SafetensorError

from embedgeo import __version__
from embedgeo.demo import DemoSettings, demo
from embedgeo.doctor import DoctorSettings, doctor
from embedgeo.sweep import SweepSettings, check, sweep

ABOUT = """Watch the geometry of a transformer's embeddings while it trains.
Exit status: 0 all done, 1 check found duplicates, 2 a wrong option or a folder that cannot be used, 3 some checkpoints
failed (the next run tries only those), 130 stopped by Ctrl-C or SIGTERM."""


def report(dirs: list[str], out: Path | None = None, model_group: list[str] | dict[str, Any] | tuple[()] = ()) -> None:
    """Draw what runs have measured: figures with their numbers, and one page.

    Args:
        dirs: folders of sweeps, or of monitored runs (``history.parquet``, or TensorBoard event files); several are
            compared with each other.
        out: the folder to write to; default: ``report`` in the first folder. An earlier report in it is replaced; a
            folder with anything else is refused.
        model_group: groups of models, as ``encoder=a,b decoder=c``, which comparisons tell apart by line style; in YAML
            also a mapping. A model is named as in its sweep, or as the report names it; default: the sweep's groups.
    """
    from embedgeo.report import write_report
    from embedgeo.results.groups import parse_groups

    print(write_report([Path(folder) for folder in dirs], out, parse_groups(model_group)))


COMMANDS: dict[str, tuple[Callable[..., int | None], Callable[..., Any]]] = {
    "demo": (demo, DemoSettings),
    "sweep": (sweep, SweepSettings),
    "check": (check, check),
    "doctor": (doctor, DoctorSettings),
    "report": (report, report),
}
"""What each command runs, and whose arguments are its options: its own, or those of the settings that it takes."""

_POSITIONAL = {"dirs": "DIR", "model_or_config": "MODEL_OR_CONFIG"}
"""Arguments that are given by position, as the help calls them."""

_STOPPED = {
    "sweep": "; started again, it goes on where it was",
    "report": "; no report was written, and an earlier one is as it was",
}
"""What is left by a command that was stopped."""


class _Values(list[Any]):
    """Values given on the command line, not in a configuration or by default."""


class _Extend(Action):
    """Takes several values: ``--text a b``, ``--text a --text b`` or ``--text '[a, b]'``."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest, None)
        given = _Values(before if isinstance(before, _Values) else ())
        for value in values:
            given += self.read(value)
        setattr(namespace, self.dest, given)

    def read(self, value: str) -> list[Any]:
        """The values in one argument."""
        return yaml.safe_load(value) if re.fullmatch(r"\[.*\]", value) else [value]


class _ExtendNumbers(_Extend):
    """Takes several numbers: also ``0,1``."""

    def read(self, value: str) -> list[Any]:
        """The numbers in one argument."""
        try:
            return [int(part) for part in value.strip("[]").split(",")]
        except ValueError:
            raise ArgumentError(self, f"must be whole numbers, as 0 1 or 0,1; got {value!r}") from None


class _Parser(ArgumentParser):
    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Options that an abbreviation stands for: each once, though it has two spellings."""
        return list({id(found[0]): found for found in super()._get_option_tuples(option_string)}.values())  # type: ignore[no-untyped-call]

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """One line that names the rule, without the list of all options."""
        message = message.replace("invalid _boolean_type value:", "must be true or false; got")
        message = re.sub(r"(required: )\w+\.", r"\1", message)  # of the names of a command and its argument
        print(f"embedgeo: error: {' '.join(message.split())} (embedgeo --help lists the options)", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: what follows the program's name; default: that of this process, which Ctrl-C and SIGTERM then end at
            once, whatever is being downloaded.

    Returns:
        The exit status.

    Raises:
        SystemExit: after ``--help`` (0) and for a wrong option (2).
    """
    if argv is None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = _parser().parse_args(sys.argv[1:] if argv is None else list(argv))
    options = chosen[chosen.subcommand].as_dict()
    options.pop("config")
    run, settings = COMMANDS[chosen.subcommand]
    try:
        status = run(**options) if settings is run else run(settings(**options))
    except (OSError, SafetensorError, ValueError) as error:
        print(f"embedgeo: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, SystemExit) as stopped:
        if isinstance(stopped, SystemExit) and not isinstance(stopped.__context__, KeyboardInterrupt):
            raise  # not lightning's for a KeyboardInterrupt
        print(f"embedgeo: stopped{_STOPPED.get(chosen.subcommand, '')}", file=sys.stderr)
        if argv is None:
            sys.stdout.flush()
            os._exit(130)  # an ordinary exit waits for the threads that download
        return 130
    return int(status or 0)


def _parser() -> ArgumentParser:
    parser = _Parser(prog="embedgeo", description=ABOUT, allow_abbrev=True, version=__version__)
    commands = parser.add_subcommands(required=True)
    for name, (run, settings) in COMMANDS.items():
        command = _Parser(description=parse(run.__doc__ or "").description, allow_abbrev=True)
        command.add_argument("--config", action="config", help="a YAML file of these options")
        _add_options(command, settings)
        commands.add_subcommand(name, command, help=parse(run.__doc__ or "").short_description)
    return parser


def _add_options(parser: ArgumentParser, settings: Callable[..., Any]) -> None:
    """An option for each argument, with its type, default and description; those of `_POSITIONAL` by position."""
    described = {argument.arg_name: argument.description for argument in parse(settings.__doc__ or "").params}
    for name, parameter in signature(settings, eval_str=True).parameters.items():
        many = list[str] in (parameter.annotation, *getattr(parameter.annotation, "__args__", ()))
        kind: dict[str, Any] = {"nargs": "+", "action": _Extend} if many else {"type": parameter.annotation}
        if parameter.annotation is bool:
            kind = {"nargs": "?", "action": ActionYesNo(no_prefix="no-")}
        elif parameter.annotation == Sequence[int]:
            kind = {"nargs": "+", "action": _ExtendNumbers}
        if name in _POSITIONAL:
            parser.add_argument(name, metavar=_POSITIONAL[name], help=described[name], **kind)
            continue
        hyphened = f"--{name.replace('_', '-')}"
        presence = {"required": True} if parameter.default is Parameter.empty else {"default": parameter.default}
        option = parser.add_argument(*dict.fromkeys((hyphened, f"--{name}")), help=described[name], **presence, **kind)
        option.option_strings = [hyphened]  # the only one that the help shows


if __name__ == "__main__":
    sys.exit(main())
