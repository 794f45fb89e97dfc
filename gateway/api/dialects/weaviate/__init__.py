"""Weaviate's API."""
