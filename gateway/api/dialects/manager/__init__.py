"""TEI Manager's errors and paths."""
