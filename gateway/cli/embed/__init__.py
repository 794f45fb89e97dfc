"""`gateway embed`: files of rows to files of rows with vectors, through a running gateway."""
