"""embedgeo."""
