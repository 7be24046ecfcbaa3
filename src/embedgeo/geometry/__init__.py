"""Metrics at the layers of a model: what the monitor, the sweep and `observe` have in common."""

from embedgeo.geometry.geometry import Geometry as Geometry
from embedgeo.geometry.geometry import observe as observe
