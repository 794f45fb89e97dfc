"""Resolution of relative paths, which start from the folder of router.yaml."""

from pathlib import Path
from typing import TypeVar

import msgspec

from backends.checkpoints.needed_files import is_path
from gateway.config.schema import (
    OWN_VOCABULARY,
    Config,
    FetchSettings,
    IssuerSettings,
    ListenerTls,
    MediaSettings,
    UpstreamSettings,
    UpstreamTls,
)

_Tls = TypeVar("_Tls", ListenerTls, UpstreamTls)
_WithCa = TypeVar("_WithCa", FetchSettings, IssuerSettings)


def resolve_paths(config: Config, base: Path) -> Config:
    """Return the config with the paths of files and folders resolved from a folder."""
    upstreams = {name: resolve_upstream_paths(upstream, base) for name, upstream in config.upstreams.items()}
    tls = config.tls and _resolve_tls_paths(config.tls, base)
    files = None if config.admin.files is None else str(base / config.admin.files)
    state_dir = None if config.state_dir is None else str(base / config.state_dir)
    admin = msgspec.structs.replace(config.admin, files=files)
    media = _resolve_media_paths(config.media, base)
    sign_on = {name: _resolve_ca(issuer, base) for name, issuer in config.sign_on.items()}
    batches = config.batches and msgspec.structs.replace(config.batches, dir=str(base / config.batches.dir))
    return msgspec.structs.replace(
        config,
        upstreams=upstreams,
        tls=tls,
        admin=admin,
        state_dir=state_dir,
        media=media,
        sign_on=sign_on,
        batches=batches,
    )


def resolve_upstream_paths(upstream: UpstreamSettings, base: Path) -> UpstreamSettings:
    """Return the upstream with its paths resolved from a folder; hub ids stay as they are."""

    def resolve(name: str | None) -> str | None:
        return None if name is None else resolve_model(name, base)

    encoding = upstream.token_encoding
    return msgspec.structs.replace(
        upstream,
        tls=_resolve_tls_paths(upstream.tls, base),
        # A remote upstream's model is the name that the server knows, not a path on this machine.
        model=resolve(upstream.model) if upstream.is_hosted else upstream.model,
        tokenizer=resolve(upstream.tokenizer),
        token_encoding=encoding if encoding == OWN_VOCABULARY else resolve(encoding),
    )


def resolve_model(name: str, base: Path) -> str:
    """Return a hub id as it is, and a path from a folder. A name of a folder that exists is a path."""
    if name.startswith(("/", "~")):
        return name
    return str((base / name).resolve()) if is_path(name) or (base / name).is_dir() else name


def _resolve_media_paths(media: MediaSettings, base: Path) -> MediaSettings:
    if media.fetch is None:
        return media
    return msgspec.structs.replace(media, fetch=_resolve_ca(media.fetch, base))


def _resolve_ca(settings: _WithCa, base: Path) -> _WithCa:
    if settings.ca is None:
        return settings
    return msgspec.structs.replace(settings, ca=str(base / settings.ca))


def _resolve_tls_paths(tls: _Tls, base: Path) -> _Tls:
    paths = {name: path and str(base / path) for name, path in msgspec.structs.asdict(tls).items()}
    return msgspec.structs.replace(tls, **paths)
