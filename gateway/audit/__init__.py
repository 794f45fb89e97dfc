"""Audit of what operators change: one append-only record per change."""
