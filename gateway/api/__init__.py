"""HTTP in front of the gateway: caller dialects, operator endpoints, and the server below both."""
