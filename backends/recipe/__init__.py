"""Decisions that the small files of a checkpoint make; nothing here loads torch."""
