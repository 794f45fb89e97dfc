"""Configuration: the schema of router.yaml, its loader, and the comparison of two versions."""
