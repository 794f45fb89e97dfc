"""Voyage's multimodal embeddings."""
