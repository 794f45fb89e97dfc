"""Measured runs. They send to loopback only, are bounded in count and time, and stop by themselves."""
