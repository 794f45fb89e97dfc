"""Processes: the supervisor, the HTTP workers and the engines. Importing it must not load Litestar."""
