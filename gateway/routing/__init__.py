"""Replica selection, health, and the meaning of model names."""
