"""Processes: the supervisor, the HTTP workers and the engines. The package must import without Litestar."""
