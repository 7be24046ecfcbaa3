"""The options of the demo."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DemoSettings:
    """The options of ``embedgeo demo``.

    Args:
        out: folder to write to. Of an earlier demo in it what ``embedgeo-demo.json`` lists is
            replaced; a folder with anything else in its place is refused.
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

    out: Path = Path("runs/demo")
    max_steps: int = 300
    every_n_steps: int = 25
    num_layers: int = 6
    hidden_size: int = 128
    vocab_size: int = 2048
    seq_len: int = 256
    batch_size: int = 8
    learning_rate: float = 3e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():  # before an earlier demo is replaced
            if name not in ("out", "seed") and value <= 0:
                raise ValueError(f"{name} must be more than 0; got {value}.")
