"""Local resources that the configuration refers to: resolution of relative paths, and checks.

Relative paths start from the folder of router.yaml. The checks read folders and PEM files, and look for the
optional packages that a section needs.
"""

import ssl
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import msgspec

from backends.checkpoints.needed_files import is_path
from backends.contract import KindSettings
from backends.kinds import KINDS
from gateway.config.problems import Problem, missing_extra
from gateway.config.schema import (
    OWN_VOCABULARY,
    Config,
    FetchSettings,
    IssuerSettings,
    ListenerTls,
    UpstreamSettings,
    UpstreamTls,
)
from gateway.config.upstream_checks import is_grpc

# Optional packages, by the extra that installs them.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "otlp": ("opentelemetry.exporter.otlp.proto.http",),
    "grpc": ("grpc", "grpc_health", "grpc_reflection"),
    "oidc": ("jwt", "cryptography"),
    "egress": ("h2", "socksio", "socks"),
    "azure": ("azure.identity",),
    "aws": ("botocore",),
    "google": ("google.auth", "requests"),
}
# Keys of TLS settings, of callers and of upstreams, that name files.
TLS_FILES = ("certificate", "private_key", "client_ca", "ca")
NO_EXPORTER = "needs the extra `otlp`: .venv/bin/pip install -r requirements/otlp.txt"

_Tls = TypeVar("_Tls", ListenerTls, UpstreamTls)
_WithCa = TypeVar("_WithCa", FetchSettings, IssuerSettings)


def resolve_paths(config: Config, base: Path) -> Config:
    """Return the config with the paths of files and folders resolved from a folder."""
    upstreams = {name: resolve_upstream_paths(upstream, base) for name, upstream in config.upstreams.items()}
    tls = config.tls and _resolve_tls_paths(config.tls, base)
    files = None if config.admin.files is None else str(base / config.admin.files)
    state_dir = None if config.state_dir is None else str(base / config.state_dir)
    admin = msgspec.structs.replace(config.admin, files=files)
    fetch = config.media.fetch and _resolve_ca(config.media.fetch, base)
    media = msgspec.structs.replace(config.media, fetch=fetch)
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
        model=resolve(upstream.model) if upstream.is_local else upstream.model,
        tokenizer=resolve(upstream.tokenizer),
        **_resolved_section(upstream, base),
        token_encoding=encoding if encoding == OWN_VOCABULARY else resolve(encoding),
    )


def _resolved_section(upstream: UpstreamSettings, base: Path) -> dict[str, KindSettings]:
    """Return the section of the kind of server, by its name, with its files; empty if there is none."""
    section = getattr(upstream, upstream.backend, None)
    if section is None:
        return {}
    files = {key: str(base / file) for key, file in section.files()}
    return {upstream.backend: msgspec.structs.replace(section, **files)}


def resolve_model(name: str, base: Path) -> str:
    """Return a hub id as it is, and a path from a folder. A name of a folder that exists is a path."""
    if name.startswith(("/", "~")):
        return name
    return str((base / name).resolve()) if is_path(name) or (base / name).is_dir() else name


def _resolve_ca(settings: _WithCa, base: Path) -> _WithCa:
    if settings.ca is None:
        return settings
    return msgspec.structs.replace(settings, ca=str(base / settings.ca))


def _resolve_tls_paths(tls: _Tls, base: Path) -> _Tls:
    paths = {name: getattr(tls, name) for name in TLS_FILES if hasattr(tls, name)}
    return msgspec.structs.replace(tls, **{name: path and str(base / path) for name, path in paths.items()})


def file_problems(config: Config, extras: Mapping[str, tuple[str, ...]] = EXTRAS) -> Iterator[Problem]:
    """Yield the problems of folders, certificates and packages. Relative paths are already resolved."""
    for name, upstream in config.upstreams.items():
        yield from upstream_file_problems(upstream, f"upstreams.{name}", extras)
    if config.admin.files is not None and not Path(config.admin.files).is_dir():
        yield Problem("admin.files", f"there is no folder {config.admin.files}")
    if (listener := config.tls) is not None:
        yield from _pem_problems(listener.certificate, listener.private_key, listener.client_ca, "tls")
    if config.media.fetch is not None:
        yield from _pem_problems(None, None, config.media.fetch.ca, "media.fetch")
    for name, issuer in config.sign_on.items():
        yield from _pem_problems(None, None, issuer.ca, f"sign_on.{name}")
    for section, extra, message in (
        ("tracing", "otlp", NO_EXPORTER),
        ("metrics", "otlp", NO_EXPORTER),
        ("grpc", "grpc", missing_extra("grpc")),
        ("sign_on", "oidc", missing_extra("oidc")),
    ):
        # Absent, or without an entry.
        if getattr(config, section) not in (None, {}) and not _are_installed(extras[extra]):
            yield Problem(section, message)


def upstream_file_problems(
    upstream: UpstreamSettings, path: str, extras: Mapping[str, tuple[str, ...]] = EXTRAS
) -> Iterator[Problem]:
    """Yield the problems of one upstream's folder, packages, certificate, key and certificate authority."""
    model, tls = upstream.model or "", upstream.tls
    if upstream.is_local and is_path(model) and not Path(model).expanduser().is_dir():
        yield Problem(f"{path}.model", f"there is no folder {model}")
    if (extra := KINDS[upstream.backend].extra) is not None and not _are_installed(extras[extra]):
        yield Problem(f"{path}.backend", missing_extra(extra))
    own = None if (section := upstream.kind_settings) is None else section.extra()
    if own is not None and not _are_installed(extras[own]):
        yield Problem(f"{path}.{upstream.backend}", missing_extra(own))
    if (upstream.proxy or "").startswith("socks") and not _are_installed(extras["egress"]):
        yield Problem(f"{path}.proxy", missing_extra("egress"))
    if is_grpc(upstream) and not _are_installed(extras["grpc"]):
        yield Problem(f"{path}.replicas", f"gRPC {missing_extra('grpc')}")
    if (tls.certificate is None) is not (tls.private_key is None):
        yield Problem(f"{path}.tls", "a certificate needs its private_key, and the other way round")
    else:
        yield from _pem_problems(tls.certificate, tls.private_key, tls.ca, f"{path}.tls")


def _are_installed(packages: Sequence[str]) -> bool:
    try:
        return all(find_spec(package) for package in packages)
    except ModuleNotFoundError:
        return False


def _pem_problems(certificate: str | None, key: str | None, ca: str | None, path: str) -> Iterator[Problem]:
    """Load the files into a TLS context, which rejects those that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if certificate is not None:
            # Without a callback OpenSSL would prompt on the terminal for the password of an encrypted key.
            context.load_cert_chain(certificate, key, password=_reject_password)
    except (OSError, ValueError) as error:
        yield _pair_problem(certificate, key, path, error)
    try:
        if ca is not None:
            context.load_verify_locations(ca)
    except OSError as error:
        yield Problem(f"{path}.{'client_ca' if path == 'tls' else 'ca'}", f"cannot be used: {_reason(error)}")


def _pair_problem(certificate: str | None, key: str | None, path: str, error: Exception) -> Problem:
    """Return the problem of the file that cannot be read, or of the pair; OpenSSL names neither."""
    for name, file in (("certificate", certificate), ("private_key", key)):
        try:
            if file is not None:
                Path(file).read_bytes()
        except OSError as unreadable:
            return Problem(f"{path}.{name}", f"cannot be read: {_reason(unreadable)}")
    return Problem(f"{path}.certificate", f"cannot be used with its key: {_reason(error)}")


def _reject_password() -> str:
    raise ValueError("the key is encrypted; one without a password is needed")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return "the key belongs to a different certificate"
    if isinstance(error, ssl.SSLError):
        return "not a valid PEM file of this kind"
    return getattr(error, "strerror", None) or str(error)
