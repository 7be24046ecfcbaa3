"""The command line.

Signatures and help only: what a command needs is imported inside it, so that ``embedgeo --help`` answers at once.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jsonargparse import ArgumentParser, auto_cli
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
from safetensors import SafetensorError

from embedgeo.sweep import check, sweep

ABOUT = """Watch the geometry of a transformer's embeddings while it trains.
Exit status: 0 all done, 1 check found duplicates, 2 a wrong option or a folder that cannot be used, 3 some checkpoints
failed (the next run tries only those), 130 stopped by Ctrl-C or SIGTERM."""

_LISTS = {"--text", "--dirs"}
"""Options that take several values, as in ``--text a.txt b.txt``."""


def demo(
    out: Path = Path("runs/demo"),
    max_steps: PositiveInt = 300,
    every_n_steps: PositiveInt = 25,
    num_layers: PositiveInt = 6,
    hidden_size: PositiveInt = 128,
    vocab_size: PositiveInt = 2048,
    seq_len: PositiveInt = 256,
    batch_size: PositiveInt = 8,
    learning_rate: PositiveFloat = 3e-3,
    seed: NonNegativeInt = 0,
) -> None:
    """Train a small language model on Python's documentation and watch its geometry.

    Takes about two minutes on two cores, and needs neither a network nor a GPU.

    Args:
        out: folder to write to. An earlier demo in it is replaced; a folder with anything else is refused.
        max_steps: optimizer steps.
        every_n_steps: measure at every so many steps, besides 0, 1, 2, 4 … 512 and the last.
        num_layers: transformer blocks.
        hidden_size: width of the embeddings, a multiple of 32.
        vocab_size: tokens of the tokenizer, which is trained first.
        seq_len: tokens in a sequence, for training and measuring.
        batch_size: sequences in a training batch.
        learning_rate: the highest, reached after a twentieth of the steps.
        seed: of the weights and the order of the text.
    """
    from embedgeo.demo import Settings, run

    settings = Settings(
        max_steps=max_steps,
        every_n_steps=every_n_steps,
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        seq_len=seq_len,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
    )
    run(out, settings)


def report(dirs: list[str], out: Path | None = None) -> None:
    """Draw what runs have measured: figures with their numbers, and one page; usage: embedgeo report DIR [DIR ...].

    Args:
        dirs: folders of sweeps, or of monitored runs (``history.parquet``, or TensorBoard event files); several are
            compared with each other.
        out: the folder to write to; default: ``report`` in the first folder. An earlier report in it is replaced; a
            folder with anything else is refused.
    """
    from embedgeo.report import write_report

    print(write_report([Path(folder) for folder in dirs], out))


class _Parser(ArgumentParser):
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """One line that names the rule, without the list of all options."""
        print(f"embedgeo: error: {' '.join(message.split())} (embedgeo --help lists the options)", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: what follows the program's name; default: that of this process, which Ctrl-C and SIGTERM then end at
            once, whatever is being downloaded. Hyphens and underscores in the names of options are the same.

    Returns:
        The exit status.

    Raises:
        SystemExit: after ``--help`` (0) and for a wrong option (2).
    """
    arguments = [_with_underscores(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    if arguments[:1] == ["report"]:
        arguments = name_folders(arguments)
    if argv is None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = auto_cli(
            {"demo": demo, "sweep": sweep, "check": check, "report": report},
            args=spread_lists(arguments),
            as_positional=False,
            parser_class=_Parser,
            prog="embedgeo",
            description=ABOUT,
        )
    except (OSError, SafetensorError, ValueError) as error:
        print(f"embedgeo: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, SystemExit) as stopped:
        if isinstance(stopped, SystemExit) and not isinstance(stopped.__context__, KeyboardInterrupt):
            raise  # not lightning's for a KeyboardInterrupt
        print("embedgeo: stopped; a sweep that is started again goes on where it was", file=sys.stderr)
        if argv is None:
            sys.stdout.flush()
            os._exit(130)  # an ordinary exit waits for the threads that download
        return 130
    return int(status or 0)


def name_folders(arguments: Sequence[str]) -> list[str]:
    """Write ``report a b --out c`` as ``report --dirs a b --out c``.

    >>> name_folders(["report", "a", "--out", "c", "b"])
    ['report', '--dirs', 'a', 'b', '--out', 'c']
    """
    folders: list[str] = []
    options: list[str] = []
    for argument in arguments[1:]:
        is_value = bool(options) and options[-1].startswith("--") and "=" not in options[-1]
        (options if argument.startswith("-") or is_value else folders).append(argument)
    return ["report", *(["--dirs", *folders] if folders else []), *options]


def spread_lists(arguments: Sequence[str]) -> list[str]:
    """Write ``--text a b`` as jsonargparse takes it.

    >>> spread_lists(["sweep", "--text", "a", "b", "--steps", "0,1"])
    ['sweep', '--text+=a', '--text+=b', '--steps', '0,1']
    """
    spread: list[str] = []
    option = ""
    for argument in arguments:
        if argument.startswith("--"):
            option = argument if argument in _LISTS else ""
        if not option:
            spread.append(argument)
        elif argument != option:
            spread.append(f"{option}+={argument}")
    return spread


def _with_underscores(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else argument


if __name__ == "__main__":
    sys.exit(main())
