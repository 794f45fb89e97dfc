"""Requests by which Xinference's client prepares itself."""
