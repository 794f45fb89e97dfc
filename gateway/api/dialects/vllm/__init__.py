"""vLLM's pooling API."""
