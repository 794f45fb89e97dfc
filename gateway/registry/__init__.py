"""Checkpoints on this host: what the Hub's cache holds, downloads, checks, and the bound on the disk."""
