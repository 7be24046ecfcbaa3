"""Runs of Trackio in a local database; no server is started."""

import pytest
import trackio
from trackio.utils import MEDIA_DIR

from embedgeo.training.transformers import GeometryCallback
from tests.integrations.drawn import assert_all_pictures, loop, values
from tests.training.runs import moments
from tests.training.test_transformers import hf_trainer
