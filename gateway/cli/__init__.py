"""The command line: the only reader of the environment, and the only package that prints."""
