"""Which replica does the work, and what happens when it cannot."""
