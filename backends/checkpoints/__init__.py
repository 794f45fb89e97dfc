"""Checkpoints on this host: locations, files and what they declare."""
