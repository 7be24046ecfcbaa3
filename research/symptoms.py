"""What faults of a run, and of a measurement, do to the headline numbers: rows of docs/curves.md.

    python -m research.symptoms [--size full|small] [--out docs/symptoms.csv] [--processes 2]

The small decoder of docs/findings.md is trained up to the step at which faults begin. From there
it goes on with each fault, and without one, from the same weights on the same batches. All are
measured on one probe. A second table measures the sound model in wrong ways. Some minutes.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from jsonargparse import CLI
from torch import Tensor
from transformers import PreTrainedModel

from research.findings_runs import SIZES, Setting, Size, Task, measure, onset, rate, shared_among

KEYS = (
    "V_W_over_V_unbiased",
    "M_over_Q",
    "anisotropy",
    "intrinsic_dimension_between",
    "intrinsic_dimension",
    "mean_cosine",
)
AFTER = {"full": (4, 20, 60), "small": (1, 2, 3)}
"""Steps from the begin of a fault to the measurements, by size."""

BLOCK = 1  # the one that something is done to
LEAST = 0.1  # relative change from which on a layer counts as moved

FAULTS = (
    "other batches",
    "rate × 10",
    "rate × 30",
    "rate × 10 of one block",
    "one block drawn again",
    "one block frozen",
    "rate × 10 of the embedding",
    "one batch again and again",
    "2,000 tokens of text",
)
"""The first is none: how far numbers move by other batches."""


def block_of(model: PreTrainedModel) -> torch.nn.Module:
    """The block that something is done to."""
    return model.get_submodule(f"gpt_neox.layers.{BLOCK}")


def begin(fault: str, setting: Setting, model: PreTrainedModel) -> None:
    """What a fault does once, to the weights."""
    if fault == "one block drawn again":
        block_of(model).load_state_dict(block_of(setting.new_model()).state_dict())
    if fault == "one block frozen":
        block_of(model).requires_grad_(False)


def rates(fault: str, model: PreTrainedModel) -> Callable[[Tensor], float]:
    """By how much a fault multiplies the learning rate of a parameter."""
    everywhere = {"rate × 10": 10.0, "rate × 30": 30.0}.get(fault, 1.0)
    chosen: set[Tensor] = set()
    if fault == "rate × 10 of one block":
        chosen = set(block_of(model).parameters())
    if fault == "rate × 10 of the embedding":
        chosen = set(model.get_input_embeddings().parameters())
    return lambda parameter: 10.0 if parameter in chosen else everywhere


def continued(
    fault: str,
    setting: Setting,
    seed: int,
    model: PreTrainedModel,
    optimizer_state: dict[str, Any],
    steps: range,
) -> Iterator[tuple[int, PreTrainedModel, float]]:
    """Train on; yields the number of each step, the model after it and the loss of its batch."""
    training = setting.training
    model = deepcopy(model)
    begin(fault, setting, model)
    of_rate = rates(fault, model)
    groups = [{"params": [each], "factor": of_rate(each)} for each in model.parameters()]
    optimizer = torch.optim.AdamW(
        groups, training.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    if optimizer_state:
        optimizer.load_state_dict(
            {
                "state": deepcopy(optimizer_state["state"]),
                "param_groups": optimizer.state_dict()["param_groups"],
            }
        )
    generator = torch.Generator().manual_seed(
        seed + 1000 * steps.start + (500 if fault == "other batches" else 0)
    )
    windows = setting.windows
    if fault == "2,000 tokens of text":
        windows = windows[: 2000 - setting.body]
    task = Task("decoder", seed, is_alarm=True)
    token_ids = torch.empty(0)
    for step in steps:
        if not (fault == "one batch again and again" and len(token_ids)):
            places = torch.randint(len(windows), (training.batch_size,), generator=generator)
            token_ids = windows[places]
        loss = model(input_ids=token_ids, labels=token_ids).loss
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate(task, training, step) * group["factor"]
        optimizer.step()
        optimizer.zero_grad()
        optimizer_state.update(optimizer.state_dict())
        yield step + 1, model, loss.item()


def values_of(model: PreTrainedModel, token_ids: Tensor) -> pd.Series:
    """The headline numbers by layer and metric; `mean` is that over blocks."""
    frame = measure(model, token_ids)
    frame = frame[frame["metric"].isin(KEYS)]
    blocks = frame[frame["layer"].str.startswith("block")]
    mean = blocks.groupby("metric", as_index=False)["value"].mean().assign(layer="mean")
    return pd.concat([frame, mean]).set_index(["layer", "metric"])["value"]


def held_out_loss(setting: Setting, model: PreTrainedModel) -> float:
    """Nats a token."""
    with torch.no_grad():
        return float(model(**setting.held_out()[0]).loss)


def wrongly_measured(
    setting: Setting, num_tokens: int, model: PreTrainedModel, untrained: PreTrainedModel
) -> Iterator[tuple[str, pd.Series]]:
    """The sound model's numbers from other rows than those of the probe."""
    ids = setting.text.token_ids

    def drawn(number: int, seed: int) -> Tensor:
        return setting.sequences(ids, setting.places(number, seed))

    probe = drawn(num_tokens, 0)
    padded = probe.clone()
    padded[:, 2 * setting.body // 3 :] = setting.text.tokenizer.eos_token_id
    yield "other text", values_of(model, drawn(num_tokens, 1))
    yield "512 rows", values_of(model, drawn(512, 1))
    yield (
        "text in a row",
        values_of(model, setting.sequences(ids, setting.places(num_tokens, 1, in_a_row=True))),
    )
    yield "each sequence twice", values_of(model, probe[: len(probe) // 2].repeat(2, 1))
    yield "a third of the rows is padding", values_of(model, padded)
    yield "untrained", values_of(untrained, probe)


def changes_of(seed: int, size: Size, after_steps: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Records of relative changes, and of losses, beside the sound run of the seed."""
    training = size.alarms
    setting = Setting("decoder", training, size)
    start = onset(training)
    probe = setting.sequences(setting.text.token_ids, setting.places(size.probe, 0))
    torch.manual_seed(300 + seed)
    untrained = setting.new_model()
    state = dict[str, Any]()
    *_, (_, model, _) = continued("", setting, seed, untrained, state, range(start))
    sound = dict[int, tuple[pd.Series, float, float]]()
    last = start + after_steps[-1]
    for fault in ("", *FAULTS):
        run = continued(fault, setting, seed, model, dict(state), range(start, last))
        for step, after, loss in run:
            if step - start not in after_steps:
                continue
            found = values_of(after, probe), loss, held_out_loss(setting, after)
            if not fault:
                sound[step] = found
                continue
            values, of_batch, held_out = sound[step]
            names = {"name": fault, "steps": step - start, "seed": seed}
            for (layer, metric), change in (found[0] / values - 1).items():
                yield names | {"layer": layer, "metric": metric, "change": change}
            for metric, change in (
                ("training loss", found[1] - of_batch),
                ("held-out loss", found[2] - held_out),
            ):
                yield names | {"layer": "mean", "metric": metric, "change": change}
        if not fault:
            for name, values in wrongly_measured(setting, size.probe, after, untrained):
                names = {"name": name, "steps": 0, "seed": seed}
                for (layer, metric), change in (values / sound[last][0] - 1).items():
                    yield names | {"layer": layer, "metric": metric, "change": change}


def of_seed(seed: int, size: Size, after_steps: tuple[int, ...]) -> pd.DataFrame:
    """The records of a seed, as a table."""
    torch.set_num_threads(1)
    return pd.DataFrame(changes_of(seed, size, after_steps))


def moved(changes: pd.DataFrame, none: pd.DataFrame) -> str:
    """The layers of which a number has moved in every run, by more than twice what it does without
    a fault.
    """
    is_layer = (changes["layer"] != "mean") & changes["metric"].isin(KEYS)
    least = changes[is_layer].groupby(["layer", "metric"])["change"].agg(lambda x: x.abs().min())
    usual = none.groupby(["layer", "metric"])["change"].agg(lambda x: x.abs().max())
    far = least[(least > LEAST) & (least > 2 * usual.reindex(least.index))]
    return " ".join(sorted(set(far.index.get_level_values("layer"))))


def cell(changes: pd.Series, metric: str) -> str:
    """Mean over runs, and their range."""
    if changes.isna().any():
        return ""
    unit, digits = (100, 0) if metric in KEYS else (1, 2)
    mean, low, high = (
        # without the minus of a zero
        f"{round(unit * x, digits) + 0.0:+.{digits}f}"
        for x in (changes.mean(), changes.min(), changes.max())
    )
    return f"{mean} ({low} to {high})"


def main(
    size: Literal["full", "small"] = "full", out: Path | None = None, processes: int = 2
) -> None:
    """Print the table, in percent of the sound run's mean over blocks, and nats.

    Args:
        size: of docs/findings.md.
        out: a CSV of the same.
        processes: that runs are shared among.
    """
    seeds = range(SIZES[size].seeds if size == "full" else 1)
    records_of = partial(of_seed, size=SIZES[size], after_steps=AFTER[size])
    table = pd.concat(shared_among(processes, records_of, seeds))
    rows = list[dict[str, Any]]()
    for (name, after), changes in table.groupby(["name", "steps"], sort=False):
        none = table[
            (table["name"] == ("other batches" if after else "other text"))
            & (table["steps"] == after)
        ]
        means = changes[changes["layer"] == "mean"]
        row: dict[str, Any] = {"what": name, "steps": after or ""}
        for metric in (*KEYS, "training loss", "held-out loss"):
            of_metric = means.loc[means["metric"] == metric, "change"]
            row[metric] = cell(of_metric, metric) if len(of_metric) else ""
        rows.append(row | {"layers that moved": moved(changes, none)})
    found = pd.DataFrame(rows)
    print(found.to_csv(index=False))
    if out is not None:
        found.to_csv(out, index=False)


if __name__ == "__main__":
    CLI(main)
