"""Redis client shared by quotas, API keys, additions and fingerprints."""
