"""Checks of the command templates that instances may start."""

import re
from collections.abc import Iterator

from gateway.config.problems import Problem, unknown_name
from gateway.config.schema import CommandTemplate, Config

PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
EXTRA_ARGS = "{extra_args}"
# Fields of a request for an instance that a template may have a place for.
OPTIONAL_PLACEHOLDERS = (
    "max_batch_tokens",
    "max_concurrent_requests",
    "pooling",
    "gpu_id",
    "prometheus_port",
    "device",
)
PLACEHOLDERS = ("name", "model_id", "port", "extra_args", *OPTIONAL_PLACEHOLDERS)
REQUIRED = ("model_id", "port")
# Part of labels and messages.
KIND = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
ENGINE = "engine"


def command_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of `manager.commands` and `manager.kind`."""
    if config.manager is None:
        return
    for kind, template in config.manager.commands.items():
        path = f"manager.commands.{kind}"
        if kind == ENGINE or not KIND.fullmatch(kind):
            message = "a kind has lower-case letters, digits, dashes and underscores, and is not `engine`"
            yield Problem(path, message)
        yield from _template_problems(template, path)
    kinds = (ENGINE, *config.manager.commands)
    if config.manager.kind not in kinds:
        yield Problem("manager.kind", unknown_name("kind", config.manager.kind, kinds))


def _template_problems(template: CommandTemplate, path: str) -> Iterator[Problem]:
    names = [name for argument in template.argv for name in PLACEHOLDER.findall(argument)]
    if not template.argv or not template.argv[0] or PLACEHOLDER.search(template.argv[0]):
        yield Problem(f"{path}.argv", "begins with the program, which is no placeholder")
    for name in names:
        if name not in PLACEHOLDERS:
            message = f"{{{name}}} is no placeholder; allowed: {', '.join(PLACEHOLDERS)}"
            yield Problem(f"{path}.argv", message)
    for name in REQUIRED:
        if name not in names:
            yield Problem(f"{path}.argv", f"has no place for {{{name}}}")
    if any(EXTRA_ARGS in argument and argument != EXTRA_ARGS for argument in template.argv):
        yield Problem(f"{path}.argv", f"{EXTRA_ARGS} is an argument of its own")
    if not re.fullmatch(r"/[!-~]*", template.health):
        yield Problem(f"{path}.health", "is the path of a URL, such as /health")
