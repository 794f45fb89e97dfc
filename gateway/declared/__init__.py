"""Declarations of operators at run time: additions to router.yaml, instances and checkpoints of this host."""
