"""Hosted APIs with a request of their own for each model."""
