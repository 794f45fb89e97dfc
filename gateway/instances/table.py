"""Table of this host's instances, as every worker has it. Pure."""

from collections.abc import Iterator

from gateway.instances.records import InstanceInfo


class InstanceTable:
    """Instances in order of creation. The parent process sends them whenever one has changed."""

    def __init__(self, instances: tuple[InstanceInfo, ...] = ()) -> None:
        self._instances = instances

    def update(self, instances: tuple[InstanceInfo, ...]) -> None:
        """Replace all instances."""
        self._instances = instances

    def __len__(self) -> int:
        """Return the number of instances."""
        return len(self._instances)

    def __iter__(self) -> Iterator[InstanceInfo]:
        """Iterate in order of creation."""
        return iter(self._instances)

    def by_name(self, name: str) -> InstanceInfo | None:
        """Return the instance of a name, or None."""
        return next((instance for instance in self._instances if instance.name == name), None)

    def status_of_model(self, name: str) -> str | None:
        """Return the status of an instance that serves a model of that name when it runs, or None."""
        found = [instance.status for instance in self._instances if instance.upstream == name]
        return found[0] if found else None

    def by_index(self, index: int) -> InstanceInfo | None:
        """Return an instance by its place in the order of creation, or None."""
        return self._instances[index] if 0 <= index < len(self._instances) else None
