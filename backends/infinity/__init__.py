"""Infinity."""
