"""The built-in engine: transformers models in a child process, reached over a Unix socket."""
