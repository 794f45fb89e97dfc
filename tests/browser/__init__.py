"""Pages in a real browser; shares its fixtures by name."""
