"""What backs claims about papers and models: scripts of a clone, outside of the wheel.

Each is run as ``python -m research.NAME`` and uses public names of embedgeo alone.
"""
