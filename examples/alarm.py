"""A listener that warns when a number of a run departs from its own recent values.

python alarm.py   # half a minute on a CPU: a small model is trained, and damaged at step 60
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from numpy.lib.stride_tricks import sliding_window_view
from torch.utils.data import DataLoader
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from embedgeo import GeometryMonitor
from embedgeo.text import builtin_corpus, cut_sequences, train_tokenizer

HEADLINES = (
    "V_W_over_V_unbiased",
    "M_over_Q",
    "mean_cosine",
    "anisotropy",
    "intrinsic_dimension_between",
)
LAG = 5  # values whose median is the forecast of the next two
KEPT = 64  # values that later ones are compared with


class Departure(NamedTuple):
    step: int
    metric: str
    layer: str
    value: float
    expected: float
    deviations: float  # infinite where the value is not finite

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.metric} at {self.layer} is {self.value:.4g}; "
            f"{self.expected:.4g} was expected, and it is {self.deviations:+.1f} deviations off."
        )


class Alarm:
    """Tells of a number whose last two values are both off, in the same direction, by more than
    ``threshold`` deviations; and of one that is no longer finite.

    Args:
        tell: called with each departure as text, on every rank at the same step; `departures` has
            them all.
        metrics: keys to watch.
        layers: a regular expression of the layers to watch.
        threshold: deviations.
        warm_up: values of a number before the first two that are compared, at least 8.
    """

    def __init__(
        self,
        tell: Callable[[str], object] = rank_zero_warn,
        metrics: Iterable[str] = HEADLINES,
        layers: str = r"block\.\d+|mean",
        threshold: float = 7.0,
        warm_up: int = 40,
    ) -> None:
        self.tell, self.metrics, self.layers = tell, frozenset(metrics), re.compile(layers)
        self.threshold, self.warm_up = threshold, warm_up
        self.departures: list[Departure] = []
        self.past: dict[str, list[float]] = defaultdict(list)

    def __call__(self, step: int, records: Iterable[Any], geometry: object = None) -> None:
        for record in records:
            metric, layer, value = record["metric"], record["layer"], record["value"]
            if metric not in self.metrics or not self.layers.fullmatch(layer):
                continue
            expected, off = self.compare(self.past[f"{metric} {layer}"], value)
            if abs(off) > self.threshold:
                departure = Departure(step, metric, layer, value, expected, off)
                self.departures.append(departure)
                self.tell(str(departure))

    def compare(self, past: list[float], value: float) -> tuple[float, float]:
        """What was expected, and by how many deviations the value is off; it joins the past."""
        if not math.isfinite(value):
            last = past[-1] if past else math.nan
            past.clear()
            return last, math.nan if math.isnan(last) else math.inf
        past.append(value)
        del past[: -KEPT - 2]
        if len(past) < self.warm_up + 2:
            return math.nan, 0.0
        expected, off = deviations(np.array(past[:-2]), np.array(past[-2:]))
        if abs(off) > self.threshold:
            del past[:-2]  # from here on it is compared with its values since the departure
        return expected, off

    def state_dict(self) -> dict[str, Any]:
        return {"past": dict(self.past)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.past.update(state["past"])


def deviations(past: np.ndarray, new: np.ndarray) -> tuple[float, float]:
    """What was expected of the second of two values, and by how many deviations the one that is
    less far off is off; 0 where the two are off in different directions.

    The forecast is the median of the five values before the two, with the median of what values
    of the past differed from such forecasts. The deviation is 1.4826 times the median absolute
    deviation of these differences: of normal numbers, the standard deviation.
    """
    medians = np.median(sliding_window_view(past, LAG), axis=1)
    off = []
    for ahead, value in enumerate(new, 1):
        usual = past[LAG - 1 + ahead :] - medians[:-ahead]
        expected = medians[-1] + np.median(usual)
        scale = 1.4826 * np.median(np.abs(usual - np.median(usual)))
        scale = max(scale, 1e-15 * abs(expected))  # less is rounding
        off.append((value - expected) / scale if scale > 0 else 0.0)
    least = math.copysign(min(map(abs, off)), off[1]) if off[0] * off[1] > 0 else 0.0
    return float(expected), least


class LanguageModel(LightningModule):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.model = GPTNeoXForCausalLM(
            GPTNeoXConfig(
                vocab_size=vocab_size,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=128,
            )
        )

    def training_step(self, input_ids: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=input_ids, labels=input_ids).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Damage(Callback):
    """Draws the weights of a block anew, with large numbers."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: object) -> None:
        if trainer.global_step == 60:
            for weight in pl_module.model.gpt_neox.layers[0].mlp.parameters():
                torch.nn.init.normal_(weight)


def main() -> None:
    torch.manual_seed(0)
    text = builtin_corpus()
    tokenizer = train_tokenizer(text, 512)
    sequences = cut_sequences([tokenizer.encode(document) for document in text], 32)
    batches = DataLoader(sequences[64:], 8, shuffle=True)
    probe = DataLoader(sequences[:64], 64)
    monitor = GeometryMonitor(every_n_steps=1, probe=probe, listeners=[Alarm(warm_up=30)])
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=70,
        callbacks=[Damage(), monitor],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(LanguageModel(len(tokenizer)), batches)


if __name__ == "__main__":
    main()
