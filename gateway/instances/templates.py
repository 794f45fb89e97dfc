"""Command lines of instances, from the templates of router.yaml. Pure.

Rule: a value becomes part of exactly one argument, and no shell reads it. Only `{extra_args}`, written as an
argument of its own, becomes several.
"""

from collections.abc import Iterable, Mapping, Sequence

from gateway.config.section_checks import EXTRA_ARGS, OPTIONAL_PLACEHOLDERS, PLACEHOLDER
from gateway.instances.records import CreateInstance

# TEI Manager's defaults.
DEFAULTS = {"max_batch_tokens": "16384", "max_concurrent_requests": "512"}


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
