"""Keys of an upstream or a model that have no effect. Existing files may have them."""

from collections.abc import Iterator

from backends.torch.kind import ENGINE
from gateway.config.problems import Problem
from gateway.config.schema import Config, UpstreamSettings

# Keys of the built-in engine, which a remote server decides for itself.
ENGINE_KEYS = (
    *("revision", "dtype", "device", "compile", "runtime", "pooling", "trust_remote_code", "code_revision"),
    *("preload", "when_loading", "process"),
)
DEFAULTS = UpstreamSettings(backend=ENGINE.name)


def ignored_keys(config: Config) -> Iterator[Problem]:
    """Yield each key that is set and has no effect."""
    for name, upstream in config.upstreams.items():
        for key in () if upstream.is_hosted else ENGINE_KEYS:
            if getattr(upstream, key) != getattr(DEFAULTS, key):
                yield Problem(
                    f"upstreams.{name}.{key}",
                    f"has no effect: it is for torch, and this is {upstream.backend}",
                )
    for name, model in config.models.items():
        if model.split_by == "tenant" and len(model.members) == 1 and model.canary is None:
            yield Problem(f"models.{name}.split_by", "has no effect: one upstream gets all calls")
