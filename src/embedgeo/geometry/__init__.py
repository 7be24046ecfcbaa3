"""Metrics at the layers of a model: what the monitor, the sweep and `observe` have in common."""

from embedgeo.geometry.layers import Geometry as Geometry
from embedgeo.geometry.observing import observe as observe
