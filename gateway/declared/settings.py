"""Conversion of written additions to settings, or to all of their problems.

Rule: the author of an addition is trusted less than the author of router.yaml. An addition runs no code, and
reads from this machine only the secrets and files reserved for it: variables named UPSTREAM_…, and files
below `admin.files`. A secret is never written out, only referred to.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from backends.checkpoints.needed_files import is_path
from backends.kinds import KINDS
from gateway.config.access_checks import named_limit_problems
from gateway.config.local_files import resolve_upstream_paths, upstream_file_problems
from gateway.config.problems import ConfigError, Problem
from gateway.config.reader import type_problems
from gateway.config.schema import OWN_VOCABULARY, ModelSettings, UpstreamSettings
from gateway.config.upstream_checks import (
    FRAMING,
    HEADER_NAME,
    has_secret_parameter,
    model_problems,
    model_upstream_problems,
    upstream_problems,
)
from gateway.tenants.create_key import name_problem

NAME_CHARACTERS_MAX = 512
# A word such as Bearer may precede it.
REFERENCE = re.compile(r"(?:[A-Za-z]+ )?\$\{(?:(UPSTREAM_[A-Za-z0-9_]+)|file:([^{}]+))\}")
REFERENCES_ALLOWED = (
    "${UPSTREAM_NAME}, a variable of the gateway's, or ${file:name}, a file below `admin.files`"
)
HIDDEN = "(hidden)"
# Fields whose texts models read, with line breaks.
FREE_TEXTS = ("prompts.", "instruction_template", "rerank_template.")
# The Hub's own rule: neither part begins or ends with a dot or a dash, or contains two of them in a row.
HUB_ID = re.compile(r"(?!.*(?:\.\.|--))(?:(?![.-])[A-Za-z0-9_.-]+(?<![.-])(?:/(?=[^/])|$)){1,2}")
REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
# A host name or an address, without characters that a URL would have to escape.
BASE_URL = re.compile(
    r"(?:http|grpc)s?://(?:(?=[^:/]{1,253}(?:[:/]|$))\w(?:[\w-]{0,61}\w)?(?:\.\w(?:[\w-]{0,61}\w)?)*\.?|\[[0-9A-Fa-f:.]+\])"
    r"(?::\d{1,5})?(?:/[A-Za-z0-9._~/-]*)?(?:\?[A-Za-z0-9._~/=&-]*)?",
    re.ASCII,
)
PLAIN_HOST = re.compile(r"https://([a-z0-9.-]+)")
# Problems that only additions have.
NO_FILES = "refers to a file on the gateway's machine, but its folder, `admin.files`, is not set"
LEADS_OUT = "leads out of `admin.files`"


class SecretSources(msgspec.Struct, frozen=True):
    """Sources on this machine that additions may read. files: the only folder whose files they may name."""

    environment: Mapping[str, str]
    files: Path | None


def read_upstream(name: str, written: Any, sources: SecretSources) -> UpstreamSettings:
    """Read an upstream's settings. Raises: ConfigError with all problems."""
    path = f"upstreams.{name}"
    _raise_problems([*_name_problems(name, path), *type_problems(written, UpstreamSettings, path)])
    try:
        return _validated(msgspec.convert(written, UpstreamSettings, strict=False), path, sources)
    except (OSError, ValueError, RuntimeError) as error:
        # The file system rejects a path, or a number is too large for a field.
        raise ConfigError([Problem(path, "it, or a file it refers to, cannot be read")]) from error


def read_model(name: str, written: Any, upstreams: Mapping[str, UpstreamSettings]) -> ModelSettings:
    """Read a model's settings. upstreams: all upstreams. Raises: ConfigError with all problems."""
    path = f"models.{name}"
    _raise_problems([*_name_problems(name, path), *type_problems(written, ModelSettings, path)])
    model = msgspec.convert(written, ModelSettings, strict=False)
    _raise_problems(
        [
            *named_limit_problems(model.limits, f"{path}.limits"),
            *model_problems(name, model, upstreams),
            *model_upstream_problems(name, model, upstreams),
            *_text_problems(model, path),
        ]
    )
    return model


def redact(written: Any) -> Any:
    """Return an addition as operators see it, without values that should have been references."""
    if not isinstance(written, dict):
        return {}
    shown = dict(written)
    if isinstance(shown.get("replicas"), list):
        # A URL with a password is rejected when it is read, but it is stored as written.
        shown["replicas"] = [shown_url(str(url)) for url in shown["replicas"]]
    for key in ("api_key", "proxy"):
        if key in shown:
            shown[key] = _redact_value(shown[key])
    if "headers" in shown:
        headers = shown["headers"]
        shown["headers"] = (
            {name: _redact_value(value) for name, value in headers.items()}
            if isinstance(headers, dict)
            else HIDDEN
        )
    return shown


def shown_url(url: str) -> str:
    """Return the address of a replica as operators see it."""
    return HIDDEN if _may_show_secret(url) else url


def _may_show_secret(url: str) -> bool:
    return "@" in url or has_secret_parameter(url)


def _redact_value(value: Any) -> Any:
    return value if value == "" or (isinstance(value, str) and REFERENCE.fullmatch(value)) else HIDDEN


def _raise_problems(problems: Iterable[Problem]) -> None:
    """Raise the first problem of each path, if there are any. Raises: ConfigError."""
    by_path: dict[str, Problem] = {}
    for problem in problems:
        by_path.setdefault(problem.path, problem)
    if by_path:
        raise ConfigError(list(by_path.values()))


def _validated(upstream: UpstreamSettings, path: str, sources: SecretSources) -> UpstreamSettings:
    """Check the settings, resolve their paths and replace references by secrets."""
    _raise_problems(
        [
            *upstream_problems(upstream, path),
            *_text_problems(upstream, path),
            *_secret_problems(upstream, path),
            *_remote_problems(upstream, path),
            *_account_problems(upstream, path),
            *_file_problems(upstream, path, sources.files),
        ]
    )
    resolved = resolve_upstream_paths(upstream, sources.files) if sources.files else upstream
    _raise_problems(upstream_file_problems(resolved, path))
    return _with_secrets(resolved, path, sources)


def _name_problems(name: str, path: str) -> Iterator[Problem]:
    if len(name) > NAME_CHARACTERS_MAX:
        yield Problem(path, f"a name has at most {NAME_CHARACTERS_MAX} characters")
    problem = next(filter(None, map(name_problem, name.split("/"))), None)
    if problem is not None:
        yield Problem(path, f"{problem}; this applies to each part between slashes")


def _text_problems(settings: UpstreamSettings | ModelSettings, path: str) -> Iterator[Problem]:
    """Find placeholders outside of secrets, where they would not be replaced, and unprintable text."""
    for text_path, text in _texts(msgspec.to_builtins(settings), path):
        field = text_path.removeprefix(f"{path}.")
        if "${" in text and not (field == "api_key" or field.startswith("headers.")):
            yield Problem(text_path, "a placeholder, which only `api_key` and `headers` may contain")
        if not text.isprintable() and not field.startswith(FREE_TEXTS):
            yield Problem(text_path, "contains an unprintable character")


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield every string with its path."""
    match value:
        case str():
            yield path, value
        case dict():
            for name, item in value.items():
                yield from _texts(item, f"{path}.{name}")
        case list():
            for index, item in enumerate(value):
                yield from _texts(item, f"{path}[{index}]")


def _secret_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    """Find secrets that are written out; the messages do not repeat them."""
    if upstream.api_key and not REFERENCE.fullmatch(upstream.api_key):
        yield Problem(f"{path}.api_key", f"a secret is not written out here; allowed: {REFERENCES_ALLOWED}")
    for name, value in upstream.headers.items():
        if not HEADER_NAME.fullmatch(name):
            yield Problem(f"{path}.headers", "a header's name has letters, digits and dashes")
        elif name.lower() in FRAMING:
            yield Problem(f"{path}.headers.{name}", "cannot be set in a config")
        elif not REFERENCE.fullmatch(value):
            yield Problem(f"{path}.headers.{name}", f"a value may be a secret; allowed: {REFERENCES_ALLOWED}")


def _remote_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    """Find values that would otherwise fail only when they are used."""
    for index, url in enumerate(upstream.replicas):
        if "@" not in url and not BASE_URL.fullmatch(url):
            yield Problem(f"{path}.replicas[{index}]", "not a base URL in plain letters, http://host:port")
    if upstream.proxy is not None:
        yield Problem(
            f"{path}.proxy", "leads requests elsewhere, which router.yaml and HTTPS_PROXY alone may"
        )
    if _lends_credentials(upstream):
        yield Problem(
            f"{path}.replicas", "would get the credentials of this machine; set `api_key` in their place"
        )
    if upstream.revision is not None and not REVISION.fullmatch(upstream.revision):
        yield Problem(f"{path}.revision", "not the name of a revision")
    if upstream.trust_remote_code:
        yield Problem(f"{path}.trust_remote_code", "runs code, which router.yaml alone may allow")
    if upstream.code_revision is not None:
        yield Problem(f"{path}.code_revision", "names code to run, which router.yaml alone may allow")


def _lends_credentials(upstream: UpstreamSettings) -> bool:
    """Return whether a server elsewhere than at its vendor would get credentials of this machine."""
    section, kind = upstream.kind_settings, KINDS[upstream.backend]
    # A key takes the place of the machine's credentials only in the header that those have.
    header = upstream.api_key_header or kind.key_header or "authorization"
    has_own = bool(upstream.api_key) and header.lower() == "authorization" and kind.key_header is None
    if section is None or not section.uses_machine or has_own:
        return False
    host = PLAIN_HOST.fullmatch(section.address() or "")
    is_vendors = host is not None and host[1].endswith(tuple([f".{domain}" for domain in kind.hosts]))
    return not is_vendors or upstream.replicas != (section.address(),)


def _account_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    """Find settings that choose among the accounts of this machine."""
    if (section := upstream.kind_settings) is not None:
        for key in section.accounts():
            yield Problem(
                f"{path}.{upstream.backend}.{key}",
                "chooses an account of this machine, which router.yaml alone may",
            )


def _file_problems(upstream: UpstreamSettings, path: str, files: Path | None) -> Iterator[Problem]:
    for field, name in _named_checkpoints(upstream):
        if is_path(name):
            yield from _file_path_problems(f"{path}.{field}", name, files)
        elif not HUB_ID.fullmatch(name):
            yield Problem(f"{path}.{field}", "neither a hub id nor the path of a folder")
        elif files is not None and not _is_below(files / name, files):
            # A folder of that name is used in place of the hub's model, and it may be a link.
            yield Problem(f"{path}.{field}", LEADS_OUT)
    for field, name in _named_files(upstream):
        yield from _file_path_problems(f"{path}.{field}", name, files)


def _named_files(upstream: UpstreamSettings) -> Iterator[tuple[str, str]]:
    for field, name in msgspec.structs.asdict(upstream.tls).items():
        if name is not None:
            yield f"tls.{field}", name
    if (section := upstream.kind_settings) is not None:
        for field, name in section.files():
            yield f"{upstream.backend}.{field}", name


def _named_checkpoints(upstream: UpstreamSettings) -> Iterator[tuple[str, str]]:
    model = upstream.model if upstream.is_local else None
    for field, name in (
        ("model", model),
        ("tokenizer", upstream.tokenizer),
        ("token_encoding", upstream.token_encoding),
    ):
        if name is not None and (field, name) != ("token_encoding", OWN_VOCABULARY):
            yield field, name


def _file_path_problems(path: str, name: str, files: Path | None) -> Iterator[Problem]:
    if files is None:
        yield Problem(path, NO_FILES)
    elif name.startswith("~") or not _is_below(files / name, files):
        yield Problem(path, LEADS_OUT)


def _is_below(file: Path, folder: Path) -> bool:
    # Links are followed: Kubernetes mounts each secret as a link to a file in the same folder.
    return file.resolve().is_relative_to(folder.resolve())


def _with_secrets(upstream: UpstreamSettings, path: str, sources: SecretSources) -> UpstreamSettings:
    problems: list[Problem] = []

    def fill(value: str, value_path: str) -> str:
        try:
            return _fill(value, sources)
        except ValueError as error:
            problems.append(Problem(value_path, str(error)))
            return ""

    filled = msgspec.structs.replace(
        upstream,
        api_key=fill(upstream.api_key, f"{path}.api_key"),
        headers={name: fill(value, f"{path}.headers.{name}") for name, value in upstream.headers.items()},
    )
    _raise_problems(problems)
    return filled


def _fill(value: str, sources: SecretSources) -> str:
    """Replace a reference by its secret. Raises: ValueError, which never repeats the secret."""
    match = REFERENCE.fullmatch(value)
    if match is None:
        return value
    variable, name = match.groups()
    if variable is None:
        secret = _read_secret_file(name, sources.files).strip()
    else:
        secret = sources.environment.get(variable, "").strip()
    if not secret:
        raise ValueError(f"the gateway's environment has no {variable}" if variable else "the file is empty")
    if not secret.isprintable() or not secret.isascii():
        raise ValueError("its value cannot be sent in a header")
    return value[: value.index("${")] + secret


def _read_secret_file(name: str, files: Path | None) -> str:
    if files is None:
        raise ValueError(NO_FILES)
    if not _is_below(files / name, files):
        raise ValueError(LEADS_OUT)
    try:
        return (files / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file {name} cannot be read ({type(error).__name__})") from error
