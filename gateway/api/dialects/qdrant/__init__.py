"""Qdrant's inference protocol."""
