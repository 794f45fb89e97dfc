"""Hugging Face's hosted inference."""
