"""Sweep folders as `embedgeo sweep` writes them, without a model: curves of the kind that training
gives.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from embedgeo.functional import anisotropy_null
from embedgeo.results.folder import SweepFolder
from embedgeo.results.parquet import to_frame
from embedgeo.results.records import Record, model_record

PYTHIA_STEPS = [0, *(2**k for k in range(10)), *range(1000, 144_000, 1000)]
METRICS = ("n", "Q", "M", "V", "M_over_Q", "mean_cosine", "V_W_unbiased", "V_B_unbiased")
METRICS += ("V_W_over_V_unbiased", "anisotropy", "anisotropy_null", "intrinsic_dimension")
METRICS += ("n_points", "token_types")


def layer_names(num_blocks):
    return ["embed", *(f"block.{i:02d}" for i in range(num_blocks)), "final_norm"]


def values_at(step, depth, random, *, n, dim):
    """Metrics at a relative depth: an offset that comes and goes, and context that is learnt."""
    t = np.log10(1 + step)
    offset = 0.02 + 0.9 * depth * np.exp(-((t - 1.2) ** 2) / 0.3)
    within = min(0.9, 0.6 * depth * (0.15 + 0.85 / (1 + np.exp(-2 * (t - 2.5)))))
    noise = 1 + 0.02 * random.standard_normal(4)
    Q = dim * (0.5 + 40 * depth) * (1 + t) * noise[0]
    M = Q * min(0.98, offset * noise[1])
    V = Q - M
    anisotropy = min(1.0, 0.02 + 0.5 * offset * depth * noise[2])
    dimension = 2 + 9 * within * noise[3] if depth else 30.0
    return {
        "n": n,
        "Q": Q,
        "M": M,
        "V": V,
        "M_over_Q": M / Q,
        "mean_cosine": M / Q,
        "V_W_unbiased": within * V,
        "V_B_unbiased": (1 - within) * V,
        "V_W_over_V_unbiased": within,
        "anisotropy": anisotropy,
        "anisotropy_null": float(anisotropy_null(torch.tensor(n, dtype=torch.float64), dim)),
        "intrinsic_dimension": dimension,
        "n_points": 4096.0 if depth else 900.0,
        "token_types": 3000.0,
        "n_nonfinite": 0.0,
    }


def make_sweep(
    folder,
    steps=(0, 1, 8, 64, 512, 4000),
    num_blocks=3,
    *,
    dim=64,
    n=65_536.0,
    metrics=METRICS,
    duplicates=None,
    losses=None,
    changes=None,
    sides=("",),
    series=None,
    stderr=np.nan,
):
    """Write a sweep folder.

    Args:
        folder: where to.
        steps: of the checkpoints.
        num_blocks: layers besides ``embed`` and ``final_norm``.
        dim: width.
        n: rows.
        metrics: to write, of `METRICS`; any other one has the values of ``V_W_over_V_unbiased``.
        duplicates: step of the original, by step of the copy.
        losses: by step, instead of a smooth curve.
        changes: values by step, layer and metric, instead of the smooth ones.
        sides: prefixes of the layers: ``("encoder.", "decoder.")`` for a model of two sides.
        series: by step, where there are several.
        stderr: standard error of each value, as a share of it.
    """
    random = np.random.default_rng(0)
    store = SweepFolder(folder)
    store.open({"model": ["lab/tiny"]}, {})
    layers = [f"{side}{layer}" for side in sides for layer in layer_names(num_blocks)]
    for step in steps:
        original = (duplicates or {}).get(step)
        values = {}
        for i, layer in enumerate(layers):
            smooth = values_at(step, i / (len(layers) - 1), random, n=n, dim=dim)
            values[layer] = {
                metric: (changes or {}).get(
                    (step, layer, metric), smooth.get(metric, smooth["V_W_over_V_unbiased"])
                )
                for metric in metrics
            }
        loss = (losses or {}).get(step, 11 - 1.6 * np.log10(1 + step))
        frame = to_frame(
            records_of(values, dim, loss, stderr),
            model="lab/tiny",
            revision=f"step{step}",
            step=step,
            commit="",
            series=(series or {}).get(step, "step"),
            weights_sha256=f"{step if original is None else original:064d}",
            duplicate_of=None if original is None else f"step{original}",
        )
        store.write(f"step{step}", frame)
    return folder


def records_of(values, dim, loss, stderr):
    """Records of values by layer and metric, and of the loss."""
    return [
        Record(
            layer=layer,
            layer_index=i,
            width=dim,
            metric=metric,
            value=value,
            stderr=stderr * abs(value),
        )
        for i, (layer, of_layer) in enumerate(values.items())
        for metric, value in of_layer.items()
    ] + [model_record("loss", loss)]


EVERYTHING = ("n", "Q", "M", "V", "M_over_Q", "V_W_unbiased", "V_B_unbiased", "anisotropy")
EVERYTHING += ("anisotropy_null", "intrinsic_dimension", "n_points", "token_types", "n_nonfinite")
EVERYTHING += ("a~b c",)


def everything(folder):
    """Write the folder of a sweep of six steps and three blocks that has all that is drawn.

    Four of its checkpoints have a fault each, of which a flag tells; one failed.
    """
    steps = (0, 1, 8, 64, 512, 4000)
    changes = {(512, "block.01", "n_nonfinite"): 7.0, (8, "embed", "anisotropy"): np.nan}
    make_sweep(
        folder,
        steps,
        duplicates={1: 0},
        losses={64: 30.0},
        metrics=EVERYTHING,
        changes=changes,
        stderr=0.05,
    )
    store = SweepFolder(folder)
    store.write_failure("step16", "FileNotFoundError: <no> config.json")
    return folder


def make_models(folder, models, metrics):
    """Write the sweep folder of final models.

    Args:
        folder: where to; it may be a sweep's already.
        models: their numbers of blocks.
        metrics: to write, as those of `make_sweep`.
    """
    store = SweepFolder(folder)
    store.open(store.manifest().get("asked", {"model": [*models]}), {})
    for i, (model, num_blocks) in enumerate(models.items()):
        with TemporaryDirectory() as aside:
            step = 3000 + 400 * i
            make_sweep(Path(aside), (step,), num_blocks, dim=64 + 32 * (i % 2), metrics=metrics)
            records = SweepFolder(aside).read(f"step{step}")
        series = model.replace("/", "--") if len(models) > 1 else ""
        frame = records.assign(model=model, revision="main", step=0, series=series)
        facts = {
            "has_step": "false",
            "model_class": "Model",
            "num_parameters": str(1_000_000 * (i + 1)),
        }
        store.write(f"{model.replace('/', '--')}--main", frame, facts=facts)
    return folder
