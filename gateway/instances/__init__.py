"""Instances: model servers that operators start on this host. Pure, except for the state file."""
