"""Engine process and its models, and the client for it."""
