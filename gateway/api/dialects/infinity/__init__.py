"""Infinity's API."""
