"""NVIDIA NIM, on own machines and hosted."""
