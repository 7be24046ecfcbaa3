"""How often intervals of 1.96 standard errors hold the value of the population.

Run as ``PYTHONPATH=. python benchmarks/standard_errors.py [NUMBER OF SAMPLES]``.

Simulated samples of 8,192 rows in 64 sequences, whose rows share an effect of their sequence, in 16 groups.
"""

import sys

import pandas as pd

from tests.simulations import Corpus, coverage

if __name__ == "__main__":
    num_runs = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    pd.options.display.width = 120
    for by_sequence in (True, False):
        print("groups of whole sequences" if by_sequence else "groups of rows, as if they were independent")
        print(coverage(num_runs, Corpus(), by_sequence=by_sequence).to_string(float_format="{:.4g}".format), "\n")
