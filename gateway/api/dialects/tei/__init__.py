"""Text Embeddings Inference's API."""
