"""From an addition as it was written to settings, or to every problem of it.

Rule: who may add is not who wrote router.yaml. An addition runs no code, and takes of this machine only what
the operator of it has set apart: variables named UPSTREAM_…, and files below `admin.files`. A secret is never
written out, only referred to.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from backends.checkpoints import is_path
from gateway.config.cross_checks import model_problems, upstream_problems
from gateway.config.file_checks import missing_folder, upstream_tls_problems
from gateway.config.problems import ConfigError, Problem
from gateway.config.relative_paths import resolve_upstream_paths
from gateway.config.schema import ModelSettings, UpstreamSettings
from gateway.config.type_checks import type_problems
from gateway.tenants.names import name_problem

NAME_CHARACTERS_MAX = 512
# A word such as Bearer may stand before it.
REFERENCE = re.compile(r"(?:[A-Za-z]+ )?\$\{(?:(UPSTREAM_[A-Za-z0-9_]+)|file:([^{}]+))\}")
REFERENCES_ALLOWED = (
    "${UPSTREAM_NAME}, a variable of the gateway's, or ${file:name}, a file below `admin.files`"
)
HIDDEN = "(hidden)"
# What the request itself says.
FRAMING = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer"})
HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
HUB_ID = re.compile(r"(?!.*\.\.)[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")
REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
# A name that can be looked up, or an address, and nothing that a URL would have to escape.
BASE_URL = re.compile(
    r"https?://(?:(?=[^:/]{1,253}(?:[:/]|$))\w(?:[\w-]{0,61}\w)?(?:\.\w(?:[\w-]{0,61}\w)?)*\.?|\[[0-9A-Fa-f:.]+\])"
    r"(?::\d{1,5})?(?:/[A-Za-z0-9._~/-]*)?",
    re.ASCII,
)
# What the file may say, and an addition may not.
NO_FILES = "names a file of the gateway's machine, and `admin.files`, the folder for such, is not set"
LEADS_OUT = "leads out of `admin.files`"


class SecretSources(msgspec.Struct, frozen=True):
    """What additions may take of this machine. files: the one folder whose files they may name."""

    environment: Mapping[str, str]
    files: Path | None


def read_upstream(name: str, written: Any, outside: SecretSources) -> UpstreamSettings:
    """An upstream's settings. Raises: ConfigError with all problems."""
    path = f"upstreams.{name}"
    _refuse([*_name_problems(name, path), *type_problems(written, UpstreamSettings, path)])
    try:
        return _completed(msgspec.convert(written, UpstreamSettings, strict=False), path, outside)
    except (OSError, ValueError, RuntimeError) as error:
        # A path that no file system takes, or a number that no field does.
        raise ConfigError([Problem(path, "it cannot be read, or names a file that cannot")]) from error


def read_model(name: str, written: Any, upstreams: Collection[str]) -> ModelSettings:
    """A model's settings. upstreams: those there are. Raises: ConfigError with all problems."""
    path = f"models.{name}"
    _refuse([*_name_problems(name, path), *type_problems(written, ModelSettings, path)])
    model = msgspec.convert(written, ModelSettings, strict=False)
    _refuse([*model_problems(name, model, upstreams), *_text_problems(model, path)])
    return model


def as_shown(written: Any) -> Any:
    """An addition for its operators; what should have been a reference, and may be a secret, is hidden."""
    if not isinstance(written, dict):
        return {}
    shown = dict(written)
    if isinstance(shown.get("replicas"), list):
        # A URL may hold a password, and is refused then.
        shown["replicas"] = [HIDDEN if "@" in str(one) else one for one in shown["replicas"]]
    if "api_key" in shown:
        shown["api_key"] = _as_reference(shown["api_key"])
    if "headers" in shown:
        headers = shown["headers"]
        shown["headers"] = (
            {name: _as_reference(value) for name, value in headers.items()}
            if isinstance(headers, dict)
            else HIDDEN
        )
    return shown


def _as_reference(value: Any) -> Any:
    return value if value == "" or (isinstance(value, str) and REFERENCE.fullmatch(value)) else HIDDEN


def _refuse(problems: Iterable[Problem]) -> None:
    # Of a value that is wrong in several ways, one is told.
    by_path: dict[str, Problem] = {}
    for one in problems:
        by_path.setdefault(one.path, one)
    if by_path:
        raise ConfigError(list(by_path.values()))


def _completed(upstream: UpstreamSettings, path: str, outside: SecretSources) -> UpstreamSettings:
    """With secrets in the place of references, and files found."""
    _refuse(
        [
            *upstream_problems(upstream, path),
            *_text_problems(upstream, path),
            *_secret_problems(upstream, path),
            *_remote_problems(upstream, path),
            *_file_problems(upstream, path, outside.files),
        ]
    )
    found = resolve_upstream_paths(upstream, outside.files) if outside.files else upstream
    _refuse([*missing_folder(found, path), *upstream_tls_problems(found.tls, f"{path}.tls")])
    return _with_secrets(found, path, outside)


def _name_problems(name: str, path: str) -> Iterator[Problem]:
    if len(name) > NAME_CHARACTERS_MAX:
        yield Problem(path, f"a name has at most {NAME_CHARACTERS_MAX} characters")
    problem = next(filter(None, map(name_problem, name.split("/"))), None)
    if problem is not None:
        yield Problem(path, f"{problem}; so are all parts of it between slashes")


def _text_problems(settings: UpstreamSettings | ModelSettings, path: str) -> Iterator[Problem]:
    """Placeholders are for secrets; elsewhere one would stand there as it is."""
    for place, text in _texts(msgspec.to_builtins(settings), path):
        field = place.removeprefix(f"{path}.")
        if "${" in text and not (field == "api_key" or field.startswith("headers.")):
            yield Problem(place, "a placeholder, which additions have in `api_key` and `headers` alone")
        if not text.isprintable() and not field.startswith("prompts."):
            yield Problem(place, "holds something that cannot be shown")


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every text, with its place."""
    match value:
        case str():
            yield path, value
        case dict():
            for name, one in value.items():
                yield from _texts(one, f"{path}.{name}")
        case list():
            for index, one in enumerate(value):
                yield from _texts(one, f"{path}[{index}]")


def _secret_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    """The value itself stays out of the message."""
    if upstream.api_key and not REFERENCE.fullmatch(upstream.api_key):
        yield Problem(f"{path}.api_key", f"a secret is not written out here; allowed: {REFERENCES_ALLOWED}")
    for name, value in upstream.headers.items():
        if not HEADER_NAME.fullmatch(name):
            yield Problem(f"{path}.headers", "a header's name has letters, digits and dashes")
        elif name.lower() in FRAMING:
            yield Problem(f"{path}.headers.{name}", "is not for a config to say")
        elif not REFERENCE.fullmatch(value):
            yield Problem(f"{path}.headers.{name}", f"a value may be a secret; allowed: {REFERENCES_ALLOWED}")


def _remote_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    """What would be found out only when somebody goes there."""
    for index, url in enumerate(upstream.replicas):
        if "@" not in url and not BASE_URL.fullmatch(url):
            yield Problem(f"{path}.replicas[{index}]", "not a base URL in plain letters, http://host:port")
    if upstream.revision is not None and not REVISION.fullmatch(upstream.revision):
        yield Problem(f"{path}.revision", "not the name of a revision")
    if upstream.trust_remote_code:
        yield Problem(f"{path}.trust_remote_code", "runs code, which router.yaml alone may allow")


def _file_problems(upstream: UpstreamSettings, path: str, files: Path | None) -> Iterator[Problem]:
    for field, name in _named_checkpoints(upstream):
        if is_path(name):
            yield from _place_problems(f"{path}.{field}", name, files)
        elif not HUB_ID.fullmatch(name):
            yield Problem(f"{path}.{field}", "neither a hub id nor the path of a folder")
    for field, name in msgspec.structs.asdict(upstream.tls).items():
        if name is not None:
            yield from _place_problems(f"{path}.tls.{field}", name, files)


def _named_checkpoints(upstream: UpstreamSettings) -> Iterator[tuple[str, str]]:
    model = upstream.model if upstream.is_hosted else None
    for field, name in (
        ("model", model),
        ("tokenizer", upstream.tokenizer),
        ("token_encoding", upstream.token_encoding),
    ):
        if name is not None:
            yield field, name


def _place_problems(path: str, name: str, files: Path | None) -> Iterator[Problem]:
    if files is None:
        yield Problem(path, NO_FILES)
    elif name.startswith("~") or not _is_below(files / name, files):
        yield Problem(path, LEADS_OUT)


def _is_below(place: Path, folder: Path) -> bool:
    # Links are followed: as Kubernetes mounts secrets, each is one to a file beside it.
    return place.resolve().is_relative_to(folder.resolve())


def _with_secrets(upstream: UpstreamSettings, path: str, outside: SecretSources) -> UpstreamSettings:
    problems: list[Problem] = []

    def filled(value: str, place: str) -> str:
        try:
            return _filled(value, outside)
        except ValueError as error:
            problems.append(Problem(place, str(error)))
            return ""

    found = msgspec.structs.replace(
        upstream,
        api_key=filled(upstream.api_key, f"{path}.api_key"),
        headers={name: filled(value, f"{path}.headers.{name}") for name, value in upstream.headers.items()},
    )
    _refuse(problems)
    return found


def _filled(value: str, outside: SecretSources) -> str:
    """Raises: ValueError with what is wrong, and never with what was read."""
    found = REFERENCE.fullmatch(value)
    if found is None:
        return value
    variable, name = found.groups()
    secret = _of_file(name, outside.files) if variable is None else outside.environment.get(variable)
    if not secret:
        raise ValueError(f"the gateway's environment has no {variable}" if variable else "the file is empty")
    if not secret.isprintable() or not secret.isascii():
        raise ValueError("what it refers to is no header's value")
    return value[: value.index("${")] + secret


def _of_file(name: str, files: Path | None) -> str:
    if files is None:
        raise ValueError(NO_FILES)
    if not _is_below(files / name, files):
        raise ValueError(LEADS_OUT)
    try:
        return (files / name).read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file {name} cannot be read ({type(error).__name__})") from error
