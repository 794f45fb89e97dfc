"""The one time after which a test gives up on an event that should have come.

It only keeps a hang from blocking the run, so it is far above what a slow machine needs. No test may pass or
fail by it on a machine that is busy. pytest's own `timeout` in pyproject.toml is longer.
"""

PATIENCE_S = 150.0
