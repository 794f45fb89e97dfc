"""Real processes: the command a user types, with its children, signals and sockets."""
