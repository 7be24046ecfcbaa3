"""What becomes of a number: its name and unit, its record, and where records are written and read."""
