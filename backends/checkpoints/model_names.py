"""Names of models: ids of a hub's repositories, and paths on this machine."""


def is_path(model: str) -> bool:
    """Return True if a model name can only be a path on this machine."""
    return model in (".", "..") or model.startswith(("/", "./", "../", "~"))
