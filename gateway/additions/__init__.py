"""Additions: upstreams and models that operators add to router.yaml at run time."""
