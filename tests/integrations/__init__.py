"""Tests that need the packages of others: ``make integrations``."""

import atexit
import os
import shutil
import tempfile

# both are read on import
# else Comet starts an experiment of its own with each run of MLflow
os.environ["COMET_DISABLE_AUTO_LOGGING"] = "1"
os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="trackio-")  # else in the home
atexit.register(shutil.rmtree, os.environ["TRACKIO_DIR"], ignore_errors=True)
