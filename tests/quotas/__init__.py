"""Quotas against a real Redis."""
