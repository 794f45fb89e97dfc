"""NVIDIA NIM's ranking."""
