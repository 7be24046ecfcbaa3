"""DADApy's TwoNN of rows in a file, in its own environment: see `benchmarks.peers`."""

from collections.abc import Callable

import numpy as np
from dadapy import IdEstimation

from benchmarks.workers import serve


def two_nn(file: str) -> Callable[[], object]:
    x = np.load(file)
    return lambda: IdEstimation(x, maxk=2, verbose=False).compute_id_2NN()


if __name__ == "__main__":
    serve(two_nn)
