"""The engine against the libraries that users would compare it with."""
