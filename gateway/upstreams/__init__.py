"""Upstreams: creation, upkeep, token counting, and their replicas and lane."""
