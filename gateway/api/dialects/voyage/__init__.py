"""Voyage's multimodal and contextualized embeddings."""
