"""Real client libraries against a gateway that runs as users run it."""
