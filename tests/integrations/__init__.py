"""Tests that need the packages of others: ``make integrations``."""

import atexit
import os
import shutil
import tempfile

os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="trackio-")  # read when Trackio is imported; else it is in the home
atexit.register(shutil.rmtree, os.environ["TRACKIO_DIR"], ignore_errors=True)
