"""Inference of Hugging Face."""
