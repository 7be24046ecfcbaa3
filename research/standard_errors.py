"""Standard errors by the jackknife: how often their intervals hold the truth.

Run as ``python -m research.standard_errors [NUMBER OF SAMPLES]``. Simulated samples of 8,192 rows
in 64 sequences, whose rows share an effect of their sequence, in 16 groups; and other designs, by
what they change.
"""

import sys

import numpy as np
import pandas as pd
import torch

from embedgeo.metrics import default_metrics
from research.simulations import Corpus, observe_rows

DIMENSIONS = "intrinsic_dimension", "intrinsic_dimension_between", "intrinsic_dimension_within"


def coverage(
    num_runs: int,
    corpus: Corpus,
    *,
    by_sequence: bool = True,
    num_groups: int = 16,
    num_sequences: int = 64,
) -> pd.DataFrame:
    """How often the interval of 1.96 standard errors around an estimate holds the value of the
    population.

    Args:
        num_runs: samples to draw, in batches of 8 sequences of 128 rows.
        corpus: what they are drawn from.
        by_sequence: deal sequences into groups; False: rows, as if they were independent.
        num_groups: G of the jackknife.
        num_sequences: of a sample.

    Returns:
        A row for each metric: the value of the population (for anisotropy and the dimensions, which
        depend on the number of rows, the mean over runs), the mean and the standard deviation of
        the estimates, the mean of the standard errors, and the share of the intervals that hold the
        value.
    """
    runs = []
    for seed in range(100, 100 + num_runs):
        embeddings, token_ids = corpus.draw(num_sequences, 128, seed)
        if not by_sequence:
            embeddings, token_ids = embeddings.flatten(0, 1)[:, None], token_ids.view(-1, 1)
        size = 8 if by_sequence else 8 * 128
        with observe_rows(default_metrics, num_groups) as geometry:
            for x, ids in zip(embeddings.split(size), token_ids.split(size), strict=True):
                geometry.model(x, ids, torch.ones_like(ids))
        runs.append({r["metric"]: (r["value"], r["stderr"]) for r in geometry.records()})
    population, rows = corpus.population(), {}
    dimensions = [key for key in DIMENSIONS if key in runs[0]]  # that within types needs sequences
    for key in (*population, "anisotropy", *dimensions):
        value, error = np.array([run[key] for run in runs]).T
        truth = population.get(key, value.mean())
        rows[key] = [
            truth,
            value.mean(),
            value.std(ddof=1),
            error.mean(),
            (abs(value - truth) <= 1.96 * error).mean(),
        ]
    return pd.DataFrame(rows, index=["population", "mean", "sd", "stderr", "coverage"]).T


DESIGNS = {
    "groups of whole sequences": (Corpus(), {}),
    "groups of rows, as if they were independent": (Corpus(), {"by_sequence": False}),
    "16 sequences: most types with two occurrences or fewer": (Corpus(), {"num_sequences": 16}),
    "200 token types: all of them in most sequences": (Corpus(num_types=200), {}),
    "4 groups": (Corpus(), {"num_groups": 4}),
    "documents of 4 sequences, dealt into 4 groups": (Corpus(document=4), {}),
}


if __name__ == "__main__":
    pd.options.display.width = 120
    for name, (corpus, changes) in DESIGNS.items():
        print(name)
        table = coverage(int(sys.argv[1]) if len(sys.argv) > 1 else 200, corpus, **changes)
        print(table.to_string(float_format="{:.4g}".format), "\n")
