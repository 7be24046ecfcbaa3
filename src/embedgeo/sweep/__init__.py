"""Geometry over the checkpoints of training runs: the commands ``embedgeo sweep`` and ``embedgeo check``."""

from collections.abc import Sequence
from typing import Any, Literal

from embedgeo.checkpoints import shared_parts
from embedgeo.results.folder import SweepFolder
from embedgeo.sweep.plan import Planned, describe, make_plan, parse_shard, shard_of
from embedgeo.sweep.quiet import quiet
from embedgeo.sweep.settings import Settings, default_out, versions
from embedgeo.text import hash_documents, read_documents

__all__ = ["check", "sweep"]


def sweep(
    model: str | list[str],
    steps: str | int | list[int] = "all",
    revisions: str = "*",
    text: str | list[str] = [],  # noqa: B006 - the command line shows it as the default
    tokenizer: str | None = None,
    num_tokens: int = 65536,
    seq_len: int = 512,
    batch_size: int = 8,
    layers: str | list[str] = "blocks",
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32",
    skip_first_positions: int = 0,
    ignore_token_ids: list[int] = [],  # noqa: B006
    token_tables: bool = False,
    after_processing: bool = False,
    out: str | None = None,
    shard: str = "0/1",
    evict: bool = True,
    dry_run: bool = False,
    model_class: str | None = None,
    trust_remote_code: bool = False,
    trainer: dict[str, Any] | None = None,
) -> int:
    """Measure the geometry of every checkpoint of a training run on the same text.

    The results go into a folder: ``checkpoints/<name>.parquet``, ``metrics.csv`` and ``tensorboard/``. Killed at any
    moment and started again, a sweep goes on where it was.

    Args:
        model: a repository on the Hub whose branches or tags name steps, a pattern (``author/name-step_*``) or a list
            of repositories, or a local folder of checkpoints (``step100/``, ``checkpoint-100/``, ``*.ckpt``).
        steps: ``all`` steps that are named; ``log``: the first, the last and those nearest to powers of two; or steps.
        revisions: take only the branches and tags that match this pattern.
        text: files of text, plain or ``.jsonl`` (field ``text``), also as ``.gz``; default: Python's documentation.
        tokenizer: a folder or repository; default: the checkpoint's, else that of ``main``.
        num_tokens: use the first so many tokens of the text.
        seq_len: tokens in a sequence. The tokenizer's special tokens are added as it does by itself: to each document;
            for an encoder to each sequence, within its length.
        batch_size: sequences in a batch; a part of the settings, for the sampled metrics depend on it.
        layers: ``blocks``, patterns of module names, or a list of these.
        dtype: of the weights.
        skip_first_positions: leave out so many positions at the start of every sequence.
        ignore_token_ids: leave out these tokens.
        token_tables: also write ``tokens/<name>.parquet``: n, Q, M and V of each token type at each layer; and
            ``projections/<name>.parquet``: where the most frequent ones lie in the plane of their principal axes.
        after_processing: also measure anisotropy and mean cosine after z-scoring, whitening and removal of the top
            directions (`embedgeo.AfterProcessing`).
        out: the folder; default: ``runs/sweep-<name>``.
        shard: take part i of n, as ``0/4``; processes that share the folder take one each. i counts from 0 or from 1.
        evict: take what this sweep downloads out of the cache again; never what was there before.
        dry_run: only say what would be done.
        model_class: of Lightning checkpoints, the LightningModule, as ``package.module.Class``.
        trust_remote_code: run the code that a repository brings along.
        trainer: options of lightning's Trainer: devices, strategy, num_nodes, precision, accelerator.

    Returns:
        Exit status: 0 all done, 3 some checkpoints failed; the next run tries only these.

    Raises:
        ValueError: an argument that cannot be, or does not fit the others, the model or the folder.
        OSError: the folder cannot be written, or the source cannot be listed.
    """
    models = (model,) if isinstance(model, str) else tuple(model)
    part = parse_shard(shard)
    documents = read_documents([text] if isinstance(text, str) else text)
    settings = Settings(
        model=models,
        revisions=revisions,
        steps=steps,
        tokenizer=tokenizer,
        num_tokens=num_tokens,
        seq_len=seq_len,
        batch_size=batch_size,
        layers=layers,
        dtype=dtype,
        skip_first_positions=skip_first_positions,
        ignore_token_ids=tuple(ignore_token_ids),
        model_class=model_class,
        trust_remote_code=trust_remote_code,
        token_tables=token_tables,
        after_processing=after_processing,
        precision=(trainer or {}).get("precision"),
        text_sha256=hash_documents(documents),
    )
    folder = SweepFolder(out or default_out(models))
    folder.require_same(settings.as_manifest())
    with quiet():
        if dry_run:
            plan = make_plan(models, revisions, steps, _known_hash(folder))
            print(describe(shard_of(plan, part), folder.done()))
            return 0
        return _run(settings, trainer or {}, part, documents, folder, evict)


def _run(
    settings: Settings,
    options: dict[str, Any],
    part: tuple[int, int],
    documents: Sequence[str],
    folder: SweepFolder,
    evict: bool,
) -> int:
    from embedgeo.sweep.measure import probe_loader
    from embedgeo.sweep.probe_text import ProbeText, empty_text, prepare_text
    from embedgeo.sweep.run import Sweep
    from embedgeo.sweep.summary import summarize
    from embedgeo.sweep.trainer import make_trainer, rendezvous

    trainer = make_trainer(options)
    job: tuple[list[Planned], list[Planned], ProbeText] | None = None
    if trainer.is_global_zero:
        plan = make_plan(settings.model, settings.revisions, settings.steps, _known_hash(folder))
        done = folder.done()
        pending = [planned for planned in shard_of(plan, part) if planned.name not in done]
        text = empty_text()
        if pending or not folder.manifest():
            text = prepare_text(documents, plan, settings)
            probe_loader(text.token_ids, text.masked, settings.batch_size, world_size=trainer.world_size)
        _open(folder, settings, text)
        job = plan, pending, text
    rendezvous(trainer)
    job = trainer.strategy.broadcast(job)
    assert job is not None
    plan, pending, text = job
    running = Sweep(trainer, settings, plan, pending, text, folder, evict)
    failures = running.run()
    if not trainer.is_global_zero:
        return 0  # a status other than 0 makes lightning end the process that writes
    records = {planned.name: folder.read(planned.name) for planned in plan if planned.name in folder.done()}
    print(summarize(records, plan, failures))
    print(f"{folder.path}: metrics.csv; tensorboard --logdir {folder.tensorboard}")
    return 3 if failures else 0


def check(model: str | list[str], steps: str | int | list[int] = "all", revisions: str = "*") -> int:
    """Compare the weights of checkpoints by their hashes, which the Hub lists without a download.

    Args:
        model: as in ``sweep``.
        steps: as in ``sweep``.
        revisions: as in ``sweep``.

    Returns:
        Exit status: 0 all different, 1 some have the same weights, or share a file of them, 3 some cannot be read.
    """
    with quiet():
        plan = make_plan(model, revisions, steps)
    groups: dict[str, list[str]] = {}
    for planned in plan:
        if planned.duplicate_of:
            groups.setdefault(planned.duplicate_of, []).append(planned.name)
    for first, others in groups.items():
        print(f"same weights: {', '.join([first, *others])}")
    parts = shared_parts({planned.name: planned.contents for planned in plan if planned.contents is not None})
    for file, names in parts:
        print(f"same file {file}: {', '.join(names)}")
    failed = [planned for planned in plan if planned.error]
    for planned in failed:
        print(f"not read: {planned.name}: {planned.error}")
    num_duplicates = sum(map(len, groups.values()))
    print(f"{len(plan)} checkpoints, {num_duplicates} of them with the weights of an earlier one")
    return 1 if groups or parts else 3 if failed else 0


def _open(folder: SweepFolder, settings: Settings, text: Any) -> None:
    """Make the folder or go on with it; the tokenizer must still give what it gave.

    Raises:
        ValueError: it gives other tokens.
    """
    before = folder.manifest().get("text", {}).get("tokens_sha256")
    if len(text.token_ids) and before not in (None, text.sha256):
        raise ValueError(
            f"a sweep folder holds results on one sequence of tokens; the tokenizer no longer gives those of "
            f"{folder.path}. Give another out."
        )
    about = {
        "versions": versions(),
        "text": {
            "sha256": settings.text_sha256,
            "tokens_sha256": text.sha256,
            "num_sequences": len(text.token_ids),
            "num_tokens": text.token_ids.numel(),
        },
    }
    folder.open(settings.as_manifest(), about)


def _known_hash(folder: SweepFolder) -> Any:
    done = folder.done()

    def known(name: str) -> str | None:
        return str(folder.read(name)["weights_sha256"].iloc[0]) if name in done else None

    return known
