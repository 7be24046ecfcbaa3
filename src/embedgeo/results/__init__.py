"""Results: records, and the files and folders that hold them."""
