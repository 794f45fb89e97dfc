"""What `kubectl apply -k` would be given, by the few of kustomize's rules that are used here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("engine", "tei", "engine-scaled", "tei-scaled")

Manifest = dict[str, Any]


class Bundle(msgspec.Struct, frozen=True):
    """One overlay. configs: the files of each ConfigMap that is made, by its name and then theirs."""

    manifests: list[Manifest]
    configs: dict[str, dict[str, Path]]

    def of_kind(self, *kinds: str) -> list[Manifest]:
        """Those of some kinds."""
        return [one for one in self.manifests if one["kind"] in kinds]

    def named(self, kind: str, name: str) -> Manifest:
        """The one of a kind with a name."""
        [found] = [one for one in self.of_kind(kind) if one["metadata"]["name"] == name]
        return found

    def pods(self) -> list[Manifest]:
        """What makes pods."""
        return self.of_kind("Deployment", "StatefulSet")


def bundle(folder: Path) -> Bundle:
    """Everything that a folder's kustomization names, patches left out."""
    told = yaml.safe_load((folder / "kustomization.yaml").read_text())
    read = Bundle([], {})
    for name in [*told["resources"], *told.get("components", [])]:
        if (path := folder / name).is_dir():
            inner = bundle(path)
            read.manifests.extend(inner.manifests)
            read.configs.update(inner.configs)
        else:
            read.manifests.extend(yaml.safe_load_all(path.read_text()))
    for made in told.get("configMapGenerator", []):
        read.configs[made["name"]] = dict(_file(folder, one) for one in made["files"])
    return read


def containers(manifest: Manifest) -> Iterator[Manifest]:
    """The containers of what makes pods."""
    yield from manifest["spec"]["template"]["spec"]["containers"]


def labels_of(manifest: Manifest) -> dict[str, str]:
    """What the pods carry."""
    labels: dict[str, str] = manifest["spec"]["template"]["metadata"]["labels"]
    return labels


def _file(folder: Path, written: str) -> tuple[str, Path]:
    name, _, path = written.rpartition("=")
    return name or path, folder / path
