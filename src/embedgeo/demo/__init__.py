"""The command ``embedgeo demo``, which imports what it needs when it runs."""

from dataclasses import dataclass
from pathlib import Path

from embedgeo.extras import require_extra

try:
    from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
except ImportError:  # then there is no command line, which checks them
    NonNegativeInt = int
    PositiveInt = int
    PositiveFloat = float


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
    max_steps: PositiveInt = 300
    every_n_steps: PositiveInt = 25
    num_layers: PositiveInt = 6
    hidden_size: PositiveInt = 128
    vocab_size: PositiveInt = 2048
    seq_len: PositiveInt = 256
    batch_size: PositiveInt = 8
    learning_rate: PositiveFloat = 3e-3
    seed: NonNegativeInt = 0


def demo(settings: DemoSettings) -> None:
    """Train a small language model on Python's documentation and watch its geometry.

    Takes about two minutes on two cores, and needs neither a network nor a GPU.
    """
    require_extra("report,sweep", "embedgeo demo")
    from embedgeo.demo.run import run_demo

    run_demo(settings)
