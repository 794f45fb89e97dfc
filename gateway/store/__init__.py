"""Redis client shared by quotas, keys, additions and fingerprints."""
