"""Checkpoints of training runs: where they are, which are the same, and how to load them."""

from embedgeo.extras import require_extra

require_extra("sweep", "embedgeo.checkpoints")
