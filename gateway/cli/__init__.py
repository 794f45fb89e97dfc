"""The command line: the only reader of the environment, and the only room that prints."""
