"""Upstreams: creation, registry, token counting, and their replicas and lane."""
