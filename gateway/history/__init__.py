"""Kept history: traffic as minutes for a day and as hours for 90 days, and the health of replicas."""
