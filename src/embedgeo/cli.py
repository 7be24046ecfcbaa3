"""The command line, which imports nothing heavy before a command runs: ``--help`` is answered at
once.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from embedgeo.demo import DemoSettings, demo
from embedgeo.extras import COMMAND_MODULES, require_extra
from embedgeo.formatting import shell_command
from embedgeo.presets import example_files, write_example
from embedgeo.sweep import SweepSettings, check, sweep

ABOUT = """Watch the geometry of a transformer's embeddings while it trains.
Exit status: 0 all done, 1 check found duplicates, 2 a wrong option or a folder that
cannot be used, 3 some checkpoints failed (the next run tries only those), 130 stopped by Ctrl-C
or SIGTERM."""


def drift(folder: Path) -> None:
    """Compare the same rows over the checkpoints of a sweep, from its saved samples.

    ``embedgeo sweep --save-samples true`` saves them. Each checkpoint is compared with the one
    before and with the first one, on at most 1,024 rows of a layer. ``drift/<name>.parquet`` has
    the records; the report, ``metrics.csv`` and ``tensorboard/`` have them with the others. What
    was interrupted goes on where it was.

    Args:
        folder: of the sweep.

    Raises:
        ImportError: a package is missing: see `embedgeo.extras`.
        ValueError: there are no saved samples of several steps, or a file is damaged.
        OSError: the folder is not there, or cannot be written.
    """
    require_extra("report", "embedgeo drift", "pandas", "pyarrow", "safetensors")
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"drift takes the folder of a sweep; {folder} is none.")
    from embedgeo.drift import compare_samples

    num_new, num_all = compare_samples(Path(folder))
    print(f"{num_new} of {num_all} checkpoints compared now: {Path(folder) / 'drift'}")
    print(shell_command("embedgeo", "report", folder))


def doctor(
    source: str,
    layers: str | list[str] = "blocks",
    batch_size: int = 8,
    seq_len: int | None = None,
    jackknife: int = 0,
    ranks: int = 1,
    trust_remote_code: bool | None = None,
) -> None:
    """Say what a monitor would do on a model before a run starts.

    That is: layers, sources of rows, bytes, and what to change. Nothing is trained, and no weights
    are downloaded.

    Args:
        source: a repository on the Hub or a local folder, of which only ``config.json`` is read.
            `embedgeo.describe` takes a model of your own.
        layers: as for ``sweep``.
        batch_size: sequences of an optimizer step on one rank.
        seq_len: tokens in a sequence; default: 512, or as many as the model has positions.
        jackknife: number of groups for standard errors.
        ranks: number of ranks that train, each on such batches of its own.
        trust_remote_code: ``true`` runs code that comes with a repository or folder, ``false``
            takes transformers' own class in its place; default: what comes with code is refused.
    """
    require_extra("sweep", "embedgeo doctor")
    from embedgeo.doctor import describe, named_model, usual_length
    from embedgeo.sweep.processes import muted_libraries
    from embedgeo.training.lightning import GeometryMonitor

    with muted_libraries():
        model = named_model(source, trust_remote_code=trust_remote_code)
        patterns = SweepSettings("", layers=layers).layer_patterns
        described = describe(
            GeometryMonitor(layers=patterns, jackknife=jackknife),
            model,
            batch_size=batch_size,
            seq_len=seq_len or usual_length(model),
            ranks=ranks,
        )
    print(described, flush=True)


def report(dirs: list[str], out: Path | None = None, reference: list[str] | tuple[()] = ()) -> None:
    """Draw what runs have measured: figures with their numbers, and one page.

    Args:
        dirs: folders of sweeps, or of monitored runs (``history.parquet``); several are
            compared with each other.
        out: the folder to write to, which several folders need; default: ``report`` in the one
            folder. An earlier report in it is replaced; a folder with anything else is refused.
        reference: folders of earlier runs, such as several seeds or a published family: the range
            of their means over blocks stands behind those of these runs, in figures of their own,
            at equal steps. They must be measured on the same text, with the same rows and settings.
            A folder that is among the others is left out.
    """
    require_extra("report", "embedgeo report")
    from embedgeo.report import write_report

    folders, earlier = (
        [Path(folder).expanduser() for folder in given] for given in (dirs, reference)
    )
    own = {*map(Path.resolve, folders)}
    others = [folder for folder in earlier if folder.resolve() not in own]
    print(write_report(folders, out and out.expanduser(), others))


def examples(name: str | None = None) -> None:
    """List the examples, or write one into the current folder.

    Args:
        name: of the example to write; its first lines say how it is run. Default: all are listed.

    Raises:
        ValueError: there is no such example.
        FileExistsError: a file of its name is there already.
    """
    if name is None:
        names = "\n".join(example_files())
        print(f"{names}\n\nembedgeo examples NAME writes one into the current folder.")
    else:
        print("\n".join(f"written: {path}" for path in write_example(name, Path())))


COMMANDS: dict[str, tuple[Callable[..., int | None], Callable[..., Any]]] = {
    "demo": (demo, DemoSettings),
    "sweep": (sweep, SweepSettings),
    "check": (check, check),
    "doctor": (doctor, doctor),
    "drift": (drift, drift),
    "report": (report, report),
    "examples": (examples, examples),
}
"""Function of each command, and whose arguments are its options: its own, or those of the settings
that it takes.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; after ``--help`` and for a wrong option SystemExit
    is raised.

    Without ``argv`` the arguments are those of this process, which Ctrl-C and SIGTERM then end at
    once, and whose threads sleep while they wait for each other, unless ``OMP_WAIT_POLICY`` says
    otherwise: beside other processes, those that keep looking take the time of the ones that they
    wait for.
    """
    try:
        require_extra("report,sweep", "the command embedgeo", *COMMAND_MODULES)
    except ImportError as missing:
        return _refused(missing)
    from safetensors import SafetensorError

    from embedgeo.options import make_parser

    if argv is None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported
        # so is this: large blocks take few pages, of 2 MB
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    parsed = make_parser(ABOUT, COMMANDS).parse_args(sys.argv[1:] if argv is None else list(argv))
    name = parsed.subcommand
    options = parsed[name].as_dict()
    options.pop("config")
    run, settings = COMMANDS[name]
    try:
        status = run(**options) if settings is run else run(settings(**options))
    except (ImportError, OSError, SafetensorError, ValueError) as error:
        return _refused(error)
    except (KeyboardInterrupt, SystemExit) as stopped:
        if isinstance(stopped, SystemExit) and not isinstance(
            stopped.__context__, KeyboardInterrupt
        ):
            raise  # not lightning's for a KeyboardInterrupt
        print("embedgeo: stopped; a sweep goes on where it was, started again", file=sys.stderr)
        if argv is None:
            sys.stdout.flush()
            os._exit(130)  # an ordinary exit waits for the threads that download
        return 130
    return int(status or 0)


def _refused(error: Exception) -> int:
    print(f"embedgeo: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
