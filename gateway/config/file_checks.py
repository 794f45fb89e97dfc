"""Checks of local resources that the configuration refers to: folders, PEM files, optional packages."""

import ssl
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from backends.checkpoints.needed_files import is_path
from gateway.config.api_checks import is_grpc
from gateway.config.problems import Problem, missing_extra
from gateway.config.schema import Config, UpstreamSettings, UpstreamTls

EXPORTER = "opentelemetry.exporter.otlp.proto.http"
GRPC_PACKAGES = ("grpc", "grpc_health", "grpc_reflection")
JOSE_PACKAGES = ("jwt", "cryptography")


def file_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of folders, certificates and packages. Relative paths are already resolved."""
    for name, upstream in config.upstreams.items():
        yield from missing_folder(upstream, f"upstreams.{name}")
        yield from missing_upstream_grpc(upstream, f"upstreams.{name}.replicas")
    if config.admin.files is not None and not Path(config.admin.files).is_dir():
        yield Problem("admin.files", f"there is no folder {config.admin.files}")
    if (listener := config.tls) is not None:
        yield from _pem_problems(listener.certificate, listener.private_key, listener.client_ca, "tls")
    for name, upstream in config.upstreams.items():
        yield from upstream_tls_problems(upstream.tls, f"upstreams.{name}.tls")
    if config.media.fetch is not None:
        yield from _pem_problems(None, None, config.media.fetch.ca, "media.fetch")
    for name, issuer in config.sign_on.items():
        yield from _pem_problems(None, None, issuer.ca, f"sign_on.{name}")
    yield from missing_exporter(config)
    yield from missing_grpc(config)
    yield from missing_jose(config)


def missing_folder(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    """Yield a problem if the checkpoint is a local path that does not exist."""
    model = upstream.model or ""
    if upstream.is_hosted and is_path(model) and not Path(model).expanduser().is_dir():
        yield Problem(f"{path}.model", f"there is no folder {model}")


def upstream_tls_problems(tls: UpstreamTls, path: str) -> Iterator[Problem]:
    """Yield the problems of one upstream's certificate, key and certificate authority."""
    if (tls.certificate is None) is not (tls.private_key is None):
        yield Problem(path, "a certificate needs its private_key, and the other way round")
    else:
        yield from _pem_problems(tls.certificate, tls.private_key, tls.ca, path)


def missing_exporter(config: Config, exporter: str = EXPORTER) -> Iterator[Problem]:
    """Yield a problem if traces are configured and the optional package that sends them is not installed."""
    if config.tracing is None:
        return
    try:
        found = find_spec(exporter)
    except ModuleNotFoundError:
        found = None
    if found is None:
        yield Problem("tracing", "needs the extra `otlp`: .venv/bin/pip install -r requirements/otlp.txt")


def missing_grpc(config: Config, packages: Sequence[str] = GRPC_PACKAGES) -> Iterator[Problem]:
    """Yield a problem if gRPC is configured and its optional packages are not installed."""
    if config.grpc is not None and not all(find_spec(package) for package in packages):
        yield Problem("grpc", missing_extra("grpc"))


def missing_jose(config: Config, packages: Sequence[str] = JOSE_PACKAGES) -> Iterator[Problem]:
    """Yield a problem if single sign-on is configured and its optional packages are not installed."""
    if config.sign_on and not all(find_spec(package) for package in packages):
        yield Problem("sign_on", missing_extra("oidc"))


def missing_upstream_grpc(
    upstream: UpstreamSettings, path: str, packages: Sequence[str] = GRPC_PACKAGES
) -> Iterator[Problem]:
    """Yield a problem if a replica is called over gRPC and the optional packages are not installed."""
    if is_grpc(upstream) and not all(find_spec(package) for package in packages):
        yield Problem(path, f"gRPC {missing_extra('grpc')}")


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
