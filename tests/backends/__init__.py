"""Adapters against their wires."""
