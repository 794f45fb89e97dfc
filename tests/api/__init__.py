"""Promises on the served wires, through the booted gateway."""
