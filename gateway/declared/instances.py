"""Checks and command lines of instances, and the file that keeps them. Uses no network.

Rule: a value of a request becomes part of exactly one argument of a command, and no shell reads it. Only
`{extra_args}`, written as an argument of its own, becomes several.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from backends.kinds import KINDS
from backends.torch.kind import ENGINE as ENGINE_KIND
from gateway.config.problems import ConfigError
from gateway.config.schema import OPERATION_SEGMENTS, CommandTemplate, Config, UpstreamSettings
from gateway.config.section_checks import EXTRA_ARGS, OPTIONAL_PLACEHOLDERS, PLACEHOLDER
from gateway.config.state_folder import lock_private
from gateway.declared.host import ENGINE, CreateInstance, InstanceRecord, invalid
from gateway.declared.settings import SecretSources, read_upstream
from gateway.declared.store import StateFile

# A name is a segment of paths, part of a socket's file name, and the name of a model.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
NAME_ALLOWED = (
    "a name has 1 to 63 letters, digits, dots, dashes and underscores, and begins with a letter or digit"
)
# TEI Manager's defaults.
DEFAULTS = {"max_batch_tokens": "16384", "max_concurrent_requests": "512"}
PORT_MIN, PORT_MAX = 1024, 65535
# Each is a process with a model. Far more than one host runs.
INSTANCES_MAX = 64
# Fields that mean nothing to the engine. The gateway's own queue takes the part of max_concurrent_requests.
NOT_FOR_ENGINES = {
    "port": "an engine has no port of its own; callers use the gateway's",
    "prometheus_port": "metrics of engines are at the gateway's /metrics",
    "extra_args": "an engine takes no arguments",
}


def check_create(
    settings: CreateInstance, kind: str, config: Config, records: Collection[InstanceRecord]
) -> None:
    """Check a request against everything but the host. kind: chosen by the request, or the default.

    config: the served one, with instances. Raises: Refused.
    """
    _check_names(settings, records)
    if len(records) >= INSTANCES_MAX:
        raise invalid(f"there are {INSTANCES_MAX} instances already; delete one first")
    commands = config.manager.commands if config.manager else {}
    if kind == ENGINE:
        _check_engine(settings)
    elif kind in commands:
        _check_command(settings, kind, commands[kind], records)
    else:
        raise invalid(f"there is no kind '{kind}'; allowed: {', '.join((ENGINE, *commands))}")
    _check_upstream(settings, kind, config, records)


class Served(msgspec.Struct, frozen=True):
    """Model and upstream of an instance. upstream: settings of an upstream for it, without replicas.

    model: hub id or absolute path.
    """

    upstream: UpstreamSettings
    model: str


def served_by(
    settings: CreateInstance, kind: str, commands: Mapping[str, CommandTemplate], sources: SecretSources
) -> Served:
    """Return what an instance serves. Reads files.

    Instances may name the models that additions may name. Raises: Refused.
    """
    written: dict[str, Any] = {"backend": ENGINE_KIND.name, "model": settings.model_id}
    if kind == ENGINE:
        device = settings.device or (None if settings.gpu_id is None else f"cuda:{settings.gpu_id}")
        pooling = None if settings.pooling is None else settings.pooling.replace("-", "_")
        optional = {"device": device, "pooling": pooling, "request_tokens": settings.max_batch_tokens}
        written |= {name: value for name, value in optional.items() if value is not None}
    try:
        hosted = read_upstream(settings.name, written, sources)
    except ConfigError as error:
        prefix = f"upstreams.{settings.name}."
        reasons = (f"{problem.path.removeprefix(prefix)}: {problem.message}" for problem in error.problems)
        raise invalid("; ".join(reasons)) from error
    assert hosted.model is not None
    if kind == ENGINE:
        return Served(hosted, hosted.model)
    if kind not in commands:
        raise invalid(f"`manager.commands` has no '{kind}'")
    # Infinity counts characters: its tokens are counted here.
    template = commands[kind]
    tokenizer = hosted.model if KINDS[template.backend].needs_tokenizer else None
    # Calls wait while the process restarts, as they do for an engine.
    upstream = UpstreamSettings(backend=template.backend, tokenizer=tokenizer, when_unavailable="wait")
    return Served(upstream, hosted.model)


def engine_settings(wanted: UpstreamSettings, joined: UpstreamSettings | None) -> UpstreamSettings:
    """Return the settings of an instance's engine. joined: the upstream that it joins, if that exists.

    An engine that joins runs the model as the upstream does, apart from what its request states.
    """
    if joined is None:
        return wanted
    stated = {name: getattr(wanted, name) for name in ("device", "pooling", "request_tokens")}
    given = {name: value for name, value in stated.items() if value is not None}
    return msgspec.structs.replace(joined, replicas=(), preload=True, **given)


def secret_sources(config: Config) -> SecretSources:
    """Return the sources of an instance's files: the folder that additions may read, and no variables."""
    return SecretSources({}, Path(config.admin.files) if config.admin.files else None)


def _check_names(settings: CreateInstance, records: Collection[InstanceRecord]) -> None:
    for name in (settings.name, settings.upstream or settings.name):
        if not NAME.fullmatch(name) or name in OPERATION_SEGMENTS | {"v1", "v2"}:
            raise invalid(f"'{name}' cannot be a name: {NAME_ALLOWED}, and is no operation such as embed")
    if any(record.name == settings.name for record in records):
        raise invalid(f"Instance '{settings.name}' already exists")
    if not settings.model_id or settings.model_id.startswith("-") or not settings.model_id.isprintable():
        raise invalid("`model_id` is a hub id, or the path of a folder below `admin.files`")
    if settings.startup_timeout_secs == 0:
        raise invalid("`startup_timeout_secs` is at least 1")


def _check_engine(settings: CreateInstance) -> None:
    for field, reason in NOT_FOR_ENGINES.items():
        # An empty list asks for nothing.
        if getattr(settings, field) not in (None, []):
            raise invalid(f"`{field}`: {reason}")
    if settings.gpu_id is not None and settings.device is not None:
        raise invalid("`gpu_id` and `device` both choose the device; set one of them")


def _check_command(
    settings: CreateInstance, kind: str, template: CommandTemplate, records: Collection[InstanceRecord]
) -> None:
    places = placeholders(template.argv)
    fields = (field for field in (*OPTIONAL_PLACEHOLDERS, "extra_args") if field not in places)
    if field := next((field for field in fields if getattr(settings, field) not in (None, [])), None):
        raise invalid(f"`{field}`: the command '{kind}' has no place for it")
    if any("\0" in text for text in settings.extra_args or ()):
        raise invalid("`extra_args` contains a NUL character")
    words = (settings.pooling or "", settings.device or "")
    if any(word.startswith("-") or not word.isprintable() for word in words):
        raise invalid("`pooling` or `device` begins with a dash, or is not printable")
    if settings.port is not None and settings.port == settings.prometheus_port:
        raise invalid("`port` and `prometheus_port` are the same")
    for field in ("port", "prometheus_port"):
        if getattr(settings, field) is not None:
            _check_port(field, getattr(settings, field), records)


def _check_port(field: str, port: int, records: Collection[InstanceRecord]) -> None:
    if not PORT_MIN <= port <= PORT_MAX:
        raise invalid(f"`{field}` is a port from {PORT_MIN} to {PORT_MAX}")
    for record in records:
        if port in (record.settings.port, record.settings.prometheus_port):
            raise invalid(f"Port {port} already in use by instance '{record.name}'")


def _check_upstream(
    settings: CreateInstance, kind: str, config: Config, records: Collection[InstanceRecord]
) -> None:
    """Check that the upstream can be joined: it has the same kind of server, or does not exist yet."""
    name = settings.upstream or settings.name
    same = [record for record in records if record.upstream == name]
    if any(record.kind != kind or record.settings.model_id != settings.model_id for record in same):
        raise invalid(f"the instances of upstream '{name}' are of another kind or model")
    if same:
        if settings.upstream is None:
            raise invalid(f"'{name}' is the name of an upstream already; name it in `upstream` to join it")
    elif name in config.upstreams:
        _check_existing(settings, kind, config, config.upstreams[name])
    elif name in config.models:
        raise invalid(f"'{name}' is the name of a model already; choose another name")
    elif config.defaults.any_name:
        raise invalid("`defaults.any_name` gives every name to one model; set it to false first")


def _check_existing(settings: CreateInstance, kind: str, config: Config, existing: UpstreamSettings) -> None:
    """Check that an instance can join an upstream of router.yaml, or an addition."""
    name = settings.upstream or settings.name
    if settings.upstream is None:
        raise invalid(f"'{name}' is the name of an upstream already; name it in `upstream` to join it")
    commands = config.manager.commands if config.manager else {}
    backend = ENGINE_KIND.name if kind == ENGINE else commands[kind].backend
    if existing.backend != backend or existing.discover is not None:
        raise invalid(f"upstream '{name}' cannot be joined: its servers are of another kind, or discovered")
    if existing.is_local and existing.model != settings.model_id:
        raise invalid(f"upstream '{name}' has another model")


def placeholders(argv: Iterable[str]) -> frozenset[str]:
    """Return the names of all placeholders in a template."""
    return frozenset(name for argument in argv for name in PLACEHOLDER.findall(argument))


def values_of(settings: CreateInstance, model: str, port: int) -> dict[str, str]:
    """Return the values of placeholders that have one. model: resolved name or path of the model."""
    given = {name: getattr(settings, name) for name in OPTIONAL_PLACEHOLDERS}
    return {
        **DEFAULTS,
        **{name: str(value) for name, value in given.items() if value is not None},
        "name": settings.name,
        "model_id": model,
        "port": str(port),
    }


def render(argv: Sequence[str], values: Mapping[str, str], extra_args: Iterable[str]) -> list[str]:
    """Return the arguments of a command.

    An argument whose placeholder has no value is left out, with the option before it.
    """
    rendered: list[str] = []
    for index, argument in enumerate(argv):
        if argument == EXTRA_ARGS:
            rendered += extra_args
        elif placeholders([argument]) <= values.keys():
            rendered.append(PLACEHOLDER.sub(lambda match: values[match[1]], argument))
        elif index and argv[index - 1].startswith("-") and not placeholders([argv[index - 1]]):
            rendered.pop()
    return rendered


class StateFileError(Exception):
    """The file cannot be used; the message gives the reason and a way out."""


class InstanceFile(StateFile[tuple[InstanceRecord, ...]]):
    """File of the instances, over a restart of the gateway, for one process at a time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "instances.json", tuple[InstanceRecord, ...])
        self._lock: IO[str] | None = None

    def open(self) -> tuple[InstanceRecord, ...]:
        """Lock the file and return its records. Raises: StateFileError."""
        try:
            self._lock = lock_private(self.folder / "instances.lock", wait=False)
        except BlockingIOError as error:
            message = f"{self.path} is used by another gateway; give each its own `state_dir`"
            raise StateFileError(message) from error
        except OSError as error:
            raise StateFileError(f"{self.folder} cannot be written: {error.strerror}") from error
        try:
            return self.read() or ()
        except OSError as error:
            self.close()
            raise StateFileError(f"{self.path} cannot be read: {error.strerror}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.close()
            message = f"{self.path} contains no instances: {error}; repair or remove it"
            raise StateFileError(message) from error

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
