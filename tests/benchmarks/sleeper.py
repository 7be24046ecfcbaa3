"""A process that takes turns, of the standard library alone: a case is the seconds it sleeps."""

import time
from functools import partial

from benchmarks.workers import serve

if __name__ == "__main__":
    serve(lambda case: partial(time.sleep, float(case)))
