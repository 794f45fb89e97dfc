"""HTTP in front of the gateway: dialects of callers, operator endpoints, and the server below both."""
