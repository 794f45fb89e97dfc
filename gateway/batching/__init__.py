"""What waits in front of an upstream, and in what pieces."""
