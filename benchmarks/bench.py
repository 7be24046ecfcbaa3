"""What the monitor costs, as ratios measured in one run: both sides interleaved, medians compared.

make bench
"""

import time
from collections.abc import Callable

import lightning
import numpy as np
import skdim
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from embedgeo.functional import anisotropy, token_table, twonn_dimension
from embedgeo.geometry import Geometry

VOCABULARY = 50_304


def medians(*sides: Callable[[], object], repeats: int) -> list[float]:
    """Median seconds of each side, after one round that does not count.

    The pause lets the threads of the other side's libraries stop spinning, so that nobody pays for them.
    """
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats + 1):
        for times, side in zip(seconds, sides, strict=True):
            time.sleep(0.3)
            start = time.perf_counter()
            side()
            times.append(time.perf_counter() - start)
    return [float(np.median(times[1:])) for times in seconds]


def zipf_tokens(*shape: int) -> Tensor:
    weights = 1 / np.arange(1, VOCABULARY + 1) ** 1.07
    return torch.from_numpy(np.random.default_rng(0).choice(VOCABULARY, shape, p=weights / weights.sum()))


def measured_step() -> None:
    """A training step of a model of Pythia-70m's shape, 8 x 512 tokens, all default metrics at all layers."""
    size = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=VOCABULARY, max_position_embeddings=2048, **size)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = zipf_tokens(8, 512)
    geometry = Geometry(model)

    def forward() -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    def finish(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def plain() -> None:
        finish(forward())

    def measured() -> None:
        with geometry.probe:
            loss = forward()
        finish(loss)
        with isolate_rng():
            geometry.compute()
        geometry.reset()

    without, with_monitor = medians(plain, measured, repeats=7)
    print(f"measured step / plain step      {with_monitor / without:6.2f}   ({without:.2f} s plain; at most 1.10)")


def intrinsic_dimension() -> None:
    """TwoNN of a Gaussian (the worst case: all distances alike) and of a 12-dimensional manifold, 4096 x 768."""
    gaussian = torch.randn(4096, 768)
    manifold = torch.tanh(torch.randn(4096, 12) @ torch.randn(12, 768) / 3)
    for name, x in (("Gaussian", gaussian), ("manifold", manifold)):
        ours, theirs = medians(lambda x=x: twonn_dimension(x), lambda x=x: skdim.id.TwoNN().fit(x.numpy()), repeats=7)
        print(f"scikit-dimension / TwoNN        {theirs / ours:6.2f}   ({ours * 1e3:.0f} ms, {name}; at least 3)")


def anisotropies() -> None:
    """Anisotropy of 4096 x 768 against the SVD of the centred rows that published code takes."""

    def svd() -> Tensor:
        values = torch.linalg.svd(x - x.mean(0), full_matrices=False).S.square()
        return values[0] / values.sum()

    x = torch.randn(4096, 768)
    ours, theirs = medians(lambda: anisotropy(x), svd, repeats=7)
    print(f"SVD / anisotropy                {theirs / ours:6.2f}   ({ours * 1e3:.0f} ms; at least 5)")


def token_tables() -> None:
    """The table of 65,536 x 768 rows against the paper's Algorithm 1, one occurrence at a time."""

    def running_means() -> None:
        n: dict[int, int] = {}
        mean: dict[int, Tensor] = {}
        mean_norm2: dict[int, Tensor] = {}
        for row, token in zip(x, ids, strict=True):
            seen = n[token] = n.get(token, 0) + 1
            if seen == 1:
                mean[token], mean_norm2[token] = row.clone(), row @ row
            else:
                mean[token] += (row - mean[token]) / seen
                mean_norm2[token] += (row @ row - mean_norm2[token]) / seen

    x, tokens = torch.randn(65_536, 768), zipf_tokens(65_536)
    ids = tokens.tolist()
    ours, theirs = medians(lambda: token_table(x, tokens), running_means, repeats=7)
    print(f"per-token loop / token table    {theirs / ours:6.2f}   ({ours * 1e3:.0f} ms; at least 6)")


if __name__ == "__main__":
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, lightning {lightning.__version__}, {torch.get_num_threads()} threads")
    intrinsic_dimension()
    anisotropies()
    token_tables()
    measured_step()
