"""Configuration: the typed `router.yaml`, its loader, and the difference between two versions."""
