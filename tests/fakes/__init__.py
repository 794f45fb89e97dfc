"""Fakes at real boundaries: servers that speak a backend's wire, reached through our real client."""
