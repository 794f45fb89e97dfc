"""Cohere's API, with the rerank paths that several vendors share."""
