"""Writes ``dadapy_values.json``: DADApy's TwoNN of the rows below, against which
`test_dimension.py` holds ours.

DADApy is not among the requirements of the tests. With the version that is noted in the file:

    pip install --target /tmp/dadapy dadapy==0.3.4
    PYTHONPATH=/tmp/dadapy python tests/dadapy_values.py

The rows are made with NumPy's ``RandomState``, whose numbers are the same in all versions, and read
by both sides.
"""

import json
import math
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_suffix(".json")


def spheres(n, dim, seed, width=768):
    """Uniform rows of a product of spheres of dimension 2, and a circle where ``dim`` is odd, on
    rotated axes.

    The volume within a distance r of a row is proportional to r^dim, on spheres for all r up to 2,
    on the circle of radius 3 nearly so: there is neither a border nor a curvature that would make
    the dimension another one.
    """
    random = np.random.RandomState(seed)
    parts = random.standard_normal((dim // 2, n, 3))
    parts = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in parts]
    if dim % 2:
        angle = 2 * math.pi * random.random_sample(n)
        parts.append(3 * np.column_stack((np.cos(angle), np.sin(angle))))
    x = np.hstack(parts)
    axes, _ = np.linalg.qr(random.standard_normal((width, x.shape[1])))
    return x @ axes.T


def clouds():
    """The rows, by name."""
    random = np.random.RandomState(0)
    line = random.standard_normal((600, 1))
    return {
        "5 dimensions": spheres(700, 5, seed=1),
        "12 dimensions": spheres(700, 12, seed=2),
        "Gaussian": random.standard_normal((500, 32)),
        "line": line * np.linspace(1, 2, 3),
        "near copies": np.vstack((line[:150], line[:150] + 1e-4 * random.standard_normal((150, 1))))
        * np.ones(3),
        "150 rows": random.standard_normal((150, 3)) + 100,
    }


def main():
    from importlib.metadata import version

    from dadapy import IdEstimation

    values = {}
    for name, x in clouds().items():
        estimation = IdEstimation(x, maxk=2, verbose=False, n_jobs=1)
        # the other way there, from products, near rows are told too badly apart
        estimation.compute_distances()
        values[name] = estimation.compute_id_2NN("base")[0]
    FILE.write_text(json.dumps({"dadapy": version("dadapy"), "values": values}, indent=1) + "\n")


if __name__ == "__main__":
    main()
