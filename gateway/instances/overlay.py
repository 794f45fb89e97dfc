"""The served configuration with the instances that calls are sent to. Pure.

Rule: the file and the additions win. An instance adds replicas to upstreams, or an upstream and a model.
"""

import msgspec

from gateway.config.schema import Config, ModelSettings, UpstreamSettings


class Joined(msgspec.Struct, frozen=True):
    """An instance that calls are sent to. settings: of its upstream, if it has to be created."""

    upstream: str
    settings: UpstreamSettings
    address: str


def with_instances(config: Config, joined: tuple[Joined, ...]) -> Config:
    """Return the configuration with these instances as replicas of their upstreams."""
    upstreams, models = dict(config.upstreams), dict(config.models)
    for instance in joined:
        current = upstreams.get(instance.upstream)
        if current is not None and current.backend != instance.settings.backend:
            # The file has gained an upstream of that name since the instance was created.
            continue
        settings = current or instance.settings
        replicas = (*settings.replicas, instance.address)
        upstreams[instance.upstream] = msgspec.structs.replace(settings, replicas=replicas)
        if not any(instance.upstream in model.upstream_names for model in models.values()):
            models.setdefault(instance.upstream, ModelSettings(upstream=instance.upstream))
    return msgspec.structs.replace(config, upstreams=upstreams, models=models)
