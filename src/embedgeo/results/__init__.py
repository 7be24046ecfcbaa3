"""What becomes of a number: its name and unit, the record it is in, and where that is written and read."""
