"""Values of fixed rows and of a fixed model, to compare two revisions of the code.

python -m benchmarks.goldens OUT.json
    measures with the `embedgeo` that Python imports. To measure another revision with the same
    script, put its ``src`` first: PYTHONPATH=OTHER/src:. python -m benchmarks.goldens OUT.json
python -m benchmarks.goldens --compare BEFORE.json AFTER.json
    prints the largest relative difference of each key, the keys and cases that only one of them
    has, and exits with 1 where a difference is too large.

Rows are Gaussian with a few large coordinates, an offset for each token id, and Zipf token ids. The
model is a GPT-NeoX of two blocks with random weights. Both are measured by every metric, on one
process and on two gloo ranks, the model also with standard errors.
"""

import argparse
import inspect
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch import Tensor

import embedgeo
from embedgeo import EmbeddingMoments, IntrinsicDimension, TokenMoments
from embedgeo.metrics import default_metrics

Values = dict[str, list[float]]
"""By name of case, layer and key: the value, or the value and its standard error."""

WIDTHS = (5, 64, 300, 768)
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
EVERY_NUMBER = partial(default_metrics, spectrum=True, id_batches=4, anisotropy_batch=4096)
NUM_RANKS = 2
TIGHT = 1e-9
LOOSE = 1e-6
SMALLEST = 1e-12
"""Smaller differences are rounding, whatever they are relative to."""
LOOSE_KEYS = (
    "anisotropy",
    "participation",
    "dimension",
    "neighbor",
    "rank",
    "isoscore",
    "_share",
    "alpha",
    "mean_cosine_",
    "cosine_std",
    "n_points",
    "duplicate",
    "V_from",
    "V_W_from",
    "V_W_unbiased_from",
    "V_by",
    "V_W_by",
    "V_W_unbiased_by",
)
"""Parts of the keys in which neighbours or products in float32 matter."""


def batches(dim: int, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Four batches of 6 sequences of 40 rows: some masked, some with a NaN, some equal."""
    generator = torch.Generator().manual_seed(dim)
    weights = 1 / np.arange(1, 401) ** 1.07
    random = np.random.default_rng(dim)
    offsets = torch.randn(400, dim, generator=generator, dtype=torch.float64)
    scale = torch.linspace(0.1, 1, dim, dtype=torch.float64)
    scale[dim // 2] = 20
    for _ in range(4):
        ids = torch.from_numpy(random.choice(400, (6, 40), p=weights / weights.sum()))
        noise = torch.randn(6, 40, dim, generator=generator, dtype=torch.float64)
        text = torch.randn(6, 1, dim, generator=generator, dtype=torch.float64)
        x = (noise + offsets[ids] + 0.5 * text + 1) * scale
        x[0, 7] = x[0, 6]
        ids[0, 7] = ids[0, 6]
        x[1, 3, 0] = math.nan
        x[2, 9, 1] = math.inf
        mask = torch.rand(6, 40, generator=generator) < 0.9
        yield {"embeddings": x.to(dtype), "token_ids": ids, "mask": mask}


def metrics_of_rows(dim: int) -> dict[str, list[Any]]:
    """Every metric, in sets whose keys do not meet."""
    return {
        "full": EVERY_NUMBER(dim, anisotropy_batch=128),
        "moments": [EmbeddingMoments(dim)],
        "counted": [TokenMoments(dim, count_range=(2, 50), regression_count_range=(2, 1000))],
        "batches": [IntrinsicDimension(dim, batch_size=256, num_batches=2, seed=3)],
        "apart": [IntrinsicDimension(dim, neighbors="other_sequences")],
    }


def of_rows() -> Values:
    """Values of the rows, of which each rank sees every second batch."""
    found: Values = {}
    rank, num_ranks = place()
    for dim in WIDTHS:
        for name, dtype in DTYPES.items():
            for kind, metrics in metrics_of_rows(dim).items():
                for metric in metrics:
                    for batch in [*batches(dim, dtype)][rank::num_ranks]:
                        metric.update(**batch)
                    case = f"rows {name} {dim} {kind}"
                    values = metric.compute()
                    found |= {f"{case} {key}": [float(each)] for key, each in values.items()}
    return found


def of_model() -> Values:
    """Values and standard errors at all layers of a model, whose probe is four batches."""
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=400,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    model = transformers.GPTNeoXForCausalLM(config).eval()
    probe = [(each["token_ids"], each["mask"].long()) for each in batches(5, torch.float32)]
    rank, num_ranks = place()
    found: Values = {}
    kinds: dict[str, dict[str, Any]] = {
        "default": {},
        "default jackknife": {"jackknife": 4},
        "full jackknife": {"metrics": EVERY_NUMBER, "jackknife": 4},
        "bfloat16 jackknife": {"jackknife": 4},
        "coordinate": {},
    }
    for kind, options in kinds.items():
        dtype = torch.bfloat16 if kind.startswith("bfloat16") else torch.float32
        model.to(dtype)
        if kind == "coordinate":  # of nearly all variance, so that there are numbers without it
            model.gpt_neox.embed_in.weight.data[:, 0] *= 30
        with torch.no_grad(), embedgeo.observe(model, **options) as geometry:
            for ids, mask in probe[rank::num_ranks]:
                model(input_ids=ids, attention_mask=mask)
        for record in geometry.records():
            name = f"model {kind} {record['layer']} {record['metric']}"
            found[name] = [record["value"], record["stderr"]]
        model.to(torch.float32)
    return found


def place() -> tuple[int, int]:
    """The rank of this process and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/init", rank=rank, world_size=NUM_RANKS)
    try:
        found = of_rows() | of_model()
        if rank == 0:
            Path(folder, "found.json").write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def measured() -> dict[str, Values]:
    """All values by number of ranks."""
    alone = of_rows() | of_model()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_rank, (folder,), nprocs=NUM_RANKS)
        on_ranks = json.loads(Path(folder, "found.json").read_text())
    return {"1 rank": alone, f"{NUM_RANKS} ranks": on_ranks}


def difference(before: float, after: float) -> float:
    """Relative difference of two numbers: 0 of two NaN, and infinity of a NaN and a number."""
    if math.isnan(before) or math.isnan(after):
        return 0.0 if math.isnan(before) and math.isnan(after) else math.inf
    if before == after or abs(before - after) <= SMALLEST:
        return 0.0
    return abs(before - after) / max(abs(before), abs(after))


def compare(before: Mapping[str, Values], after: Mapping[str, Values]) -> bool:
    """Print the differences by key; tell whether all are small."""
    largest: dict[tuple[str, str], tuple[float, str]] = {}
    missing: dict[str, set[str]] = {"dropped": set(), "new": set()}
    for ranks, values in before.items():
        others = after[ranks]
        missing["dropped"] |= {name.split()[-1] for name in values.keys() - others.keys()}
        missing["new"] |= {name.split()[-1] for name in others.keys() - values.keys()}
        for name in values.keys() & others.keys():
            key = name.split()[-1]
            pairs = zip(("value", "stderr"), values[name], others[name], strict=False)
            for kind, first, second in pairs:
                found = difference(first, second)
                case = f"{ranks}, {name}: {first!r} → {second!r}"
                largest[key, kind] = max(largest.get((key, kind), (-1.0, "")), (found, case))
    too_large = 0
    for (key, kind), (found, case) in sorted(largest.items(), key=lambda each: -each[1][0]):
        limit = LOOSE if any(part in key for part in LOOSE_KEYS) else TIGHT
        mark = "" if found <= limit else "  TOO LARGE"
        too_large += found > limit
        if found > 0:
            print(f"{found:9.2e} {key} ({kind}; at most {limit:g}){mark}  [{case}]")
    for what, keys in missing.items():
        if keys:
            print(f"{what}: {', '.join(sorted(keys))}")
    print(f"{len(largest)} keys and their errors compared, {too_large} differ by too much")
    return not too_large


def main() -> None:
    parser = argparse.ArgumentParser(
        description=inspect.getdoc(sys.modules[__name__]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", nargs="?", help="the JSON to write")
    parser.add_argument("--compare", nargs=2, metavar=("BEFORE", "AFTER"))
    arguments = parser.parse_args()
    if arguments.compare:
        before, after = (json.loads(Path(each).read_text()) for each in arguments.compare)
        sys.exit(not compare(before, after))
    if arguments.out is None:
        parser.error("a JSON to write, or --compare BEFORE AFTER, is needed")
    Path(arguments.out).write_text(json.dumps(measured()))


if __name__ == "__main__":
    main()
