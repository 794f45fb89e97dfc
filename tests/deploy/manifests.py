"""The objects of `kubectl apply -k`, built by the few rules of kustomize that the project uses."""

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
    """One overlay. configs: name of a generated ConfigMap → name of a file in it → its path."""

    manifests: list[Manifest]
    configs: dict[str, dict[str, Path]]

    def of_kind(self, *kinds: str) -> list[Manifest]:
        """Return the manifests of some kinds."""
        return [manifest for manifest in self.manifests if manifest["kind"] in kinds]

    def named(self, kind: str, name: str) -> Manifest:
        """Return the only manifest of a kind with a name."""
        [match] = [manifest for manifest in self.of_kind(kind) if manifest["metadata"]["name"] == name]
        return match

    def pods(self) -> list[Manifest]:
        """Return the manifests that create pods."""
        return self.of_kind("Deployment", "StatefulSet")


def bundle(folder: Path) -> Bundle:
    """Read everything that a folder's kustomization names, except patches."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    read = Bundle([], {})
    for name in [*kustomization.get("resources", []), *kustomization.get("components", [])]:
        if (path := folder / name).is_dir():
            inner = bundle(path)
            read.manifests.extend(inner.manifests)
            read.configs.update(inner.configs)
        else:
            read.manifests.extend(yaml.safe_load_all(path.read_text()))
    for generator in kustomization.get("configMapGenerator", []):
        read.configs[generator["name"]] = dict(_file(folder, written) for written in generator["files"])
    return read


def containers(manifest: Manifest) -> Iterator[Manifest]:
    """Yield the containers of a manifest that creates pods."""
    yield from manifest["spec"]["template"]["spec"]["containers"]


def labels_of(manifest: Manifest) -> dict[str, str]:
    """Return the labels of the pods that a manifest creates."""
    labels: dict[str, str] = manifest["spec"]["template"]["metadata"]["labels"]
    return labels


def _file(folder: Path, written: str) -> tuple[str, Path]:
    name, _, path = written.rpartition("=")
    return name or path, folder / path
