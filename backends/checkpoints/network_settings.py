"""Settings of a network that sentence-transformers writes next to it: lengths, lower case, arguments.

Pure. Source: sentence-transformers 6.2, `Transformer.load_config` and `_load_init_kwargs`.
"""

from collections.abc import Callable
from typing import Any

# The first file that is there and not empty counts. Versions before 2 named it after the architecture.
SETTINGS_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Names of versions before 5 and their successors.
RENAMED_KEYS = {
    "model_args": "model_kwargs",
    "tokenizer_args": "processor_kwargs",
    "config_args": "config_kwargs",
}


def read_network_settings(read_json: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of a network under their present names, or {} if there are none.

    read_json: reads a file of the network's folder, {} if it is missing.
    """
    files = map(read_json, SETTINGS_FILES)
    settings: dict[str, Any] = next((content for content in files if content), {})
    # A key under its old name replaces the other one.
    renamed = {new: settings[old] for old, new in RENAMED_KEYS.items() if old in settings}
    return {key: value for key, value in settings.items() if key not in RENAMED_KEYS} | renamed


def processor_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of tokenizer_config.json that the settings replace."""
    arguments: dict[str, Any] = settings.get("processor_kwargs") or {}
    return arguments
