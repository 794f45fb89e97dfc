"""The pooling server of vLLM."""
