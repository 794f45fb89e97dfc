"""The Helm chart, rendered by Helm's own engine: valid, equal to the overlays, and strict about values."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import __version__
from gateway.config.load import parse_config
from gateway.config.schema import Config
from tests.deploy.manifests import KUBERNETES, OVERLAYS, ROOT, Bundle, Manifest, bundle, containers, labels_of
from tests.waiting import PATIENCE_S

# It has no wheel for some machines.
helm = pytest.importorskip("helm_python", reason="no helm-python-sdk for this machine")

CHART = ROOT / "deploy/helm/embedding-gateway"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
RELEASE = "1.30"
FOREIGN = {"ScaledObject", "ServiceMonitor", "PodMonitor"}
# A release of this name has no prefix of its own.
NAME = "gateway"
SCALED: dict[str, Any] = {"autoscaling": {"enabled": True}, "monitoring": {"enabled": True}}
OVERLAY_VALUES: dict[str, dict[str, Any]] = {
    "engine": {},
    "tei": {"pools": {"engine": {"enabled": False}, "tei": {"enabled": True}}},
    "engine-scaled": SCALED | {"pools": {"engine": {"autoscaling": {"enabled": True}}}},
    "tei-scaled": SCALED
    | {"pools": {"engine": {"enabled": False}, "tei": {"enabled": True, "autoscaling": {"enabled": True}}}},
}
# Labels that tell releases and versions apart, which kustomize leaves out.
OF_HELM = {
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/part-of",
    "app.kubernetes.io/version",
    "helm.sh/chart",
}
SECRETS = {
    "redis-password": "random",
    "upstream-key": "random",
    "hosted-key": "random",
    "metrics-key-digest": f"sha256:{'0' * 64}",
    "admin-key-digest": f"sha256:{'1' * 64}",
}


def rendered(values: Mapping[str, Any], name: str = NAME) -> list[Manifest]:
    """Return the objects that `helm install` would create."""
    with helm.Chart.load(CHART) as chart:
        files = chart.render(dict(values), name=name, namespace="tests")
    texts = [text for path, text in files.items() if path.endswith(".yaml")]
    return [made for text in texts for made in yaml.safe_load_all(text) if made]


def config_of(text: str, folder: Path) -> Config:
    """Parse a router.yaml with secrets in files as the pods have them."""
    for name, value in SECRETS.items():
        (folder / name).write_text(value)
    return parse_config(text.replace("/secrets/", f"{folder}/"), {}, folder)


def comparable(manifests: list[Manifest]) -> dict[tuple[str, str], Any]:
    """Return manifests by kind and name, without what only the one or the other tool adds."""
    return {
        (made["kind"], made["metadata"]["name"]): plain(made)
        for made in manifests
        if made["kind"] not in {"Namespace", "ConfigMap"}
    }


def plain(value: Any) -> Any:
    """Return a part of a manifest without Helm's labels, empty maps and checksums."""
    if isinstance(value, dict):
        kept = {key: plain(part) for key, part in value.items() if key not in OF_HELM | {"annotations"}}
        return {key: part for key, part in kept.items() if part != {} or key == "podSelector"}
    return sorted(map(plain, value), key=name_of) if isinstance(value, list) else value


def name_of(part: Any) -> str:
    """Return what a part is sorted by, as the order of volumes and of a secret's items means nothing."""
    return str(part.get("name") or part.get("path") or "") if isinstance(part, dict) else ""


def kustomized(overlay: str) -> list[Manifest]:
    """Return an overlay's objects with the image, the namespace and the patches that kustomize applies."""
    made = bundle(KUBERNETES / "overlays" / overlay).manifests
    images = yaml.safe_load((KUBERNETES / "components/image/kustomization.yaml").read_text())["images"]
    full_names = {image["name"]: f"{image['newName']}:{image['newTag']}" for image in images}
    for manifest in made:
        manifest["metadata"].pop("namespace", None)
        if manifest["kind"] in {"Deployment", "StatefulSet"}:
            for container in containers(manifest):
                container["image"] = full_names.get(container["image"], container["image"])
        if manifest["kind"] == "Deployment" and overlay.endswith("-scaled"):
            del manifest["spec"]["replicas"]
    return made


def built_by_kubectl(overlay: str) -> list[Manifest]:
    """Return an overlay's objects as kubectl builds them, without the hash in names of ConfigMaps."""
    command = ["kubectl", "kustomize", str(KUBERNETES / "overlays" / overlay)]
    text = subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_S, text=True).stdout
    made = list(yaml.safe_load_all(re.sub(r"-config-[a-z0-9]{10}\b", "-config", text)))
    for manifest in made:
        manifest["metadata"].pop("namespace", None)
    return made


def with_names_of_kustomize(manifests: list[Manifest], pool: str) -> list[Manifest]:
    """Return a release's objects without the prefix of its name."""
    text = yaml.safe_dump(manifests)
    return yaml.safe_load(re.sub(rf"\bgateway-({pool}|redis|nothing|names|upstream)\b", r"\1", text))  # type: ignore[no-any-return]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_chart_makes_the_objects_of_the_overlay(overlay: str, tmp_path: Path) -> None:
    values, pool = OVERLAY_VALUES[overlay], overlay.removesuffix("-scaled")
    made = with_names_of_kustomize(rendered(values), pool)

    assert comparable(kustomized(overlay)) == comparable(made)
    if shutil.which("kubectl") is not None:
        assert comparable(built_by_kubectl(overlay)) == comparable(made)
    files = bundle(KUBERNETES / "overlays" / overlay).configs
    texts = {
        built["metadata"]["name"]: built["data"]["router.yaml"]
        for built in Bundle(made, {}).of_kind("ConfigMap")
    }
    assert set(files) == set(texts)
    for name, text in texts.items():
        assert config_of(files[name]["router.yaml"].read_text(), tmp_path) == config_of(text, tmp_path)


def check_release(made: list[Manifest], folder: Path) -> None:
    """Check that objects fit Kubernetes, one another, and the gateway."""
    for manifest in made:
        if manifest["kind"] not in FOREIGN:
            kubernetes_validate.validate(manifest, RELEASE, strict=True)
    whole = Bundle(made, {})
    assert len({(manifest["kind"], manifest["metadata"]["name"]) for manifest in made}) == len(made)
    for manifest in whole.pods():
        assert manifest["spec"]["selector"]["matchLabels"].items() <= labels_of(manifest).items()
        volumes = {volume["name"]: volume for volume in manifest["spec"]["template"]["spec"]["volumes"]}
        for container in containers(manifest):
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= set(volumes) | {"data"}
            assert not container["securityContext"]["allowPrivilegeEscalation"]
        if "config" in volumes:
            check_config(whole.named("ConfigMap", volumes["config"]["configMap"]["name"]), volumes, folder)
    for service in whole.of_kind("Service"):
        selector = service["spec"]["selector"].items()
        assert 1 == len([pod for pod in whole.pods() if selector <= labels_of(pod).items()])


def check_config(config: Manifest, volumes: Mapping[str, Any], folder: Path) -> None:
    """Check that the gateway accepts a router.yaml, and that its pods have the secrets that it names."""
    text = config["data"]["router.yaml"]
    assert config_of(text, folder).models
    needed = set(re.findall(r"\$\{file:/secrets/([\w-]+)\}", text))
    assert needed == {item["path"] for item in volumes["secrets"].get("secret", {"items": []})["items"]}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid_releases(example: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(example.read_text())

    check_release(rendered(values), tmp_path)
    report = helm.chart.lint(CHART, values, strict=True, kube_version=f"v{RELEASE}.0")
    # Information, such as that an icon is recommended, has severity 1.
    assert ([], []) == (report["errors"], [line for line in report["messages"] if line["severity"] > 1])


ON = st.just({"enabled": True})
OFF = st.just({"enabled": False})
POOL = st.fixed_dictionaries(
    {"kind": st.just("engine"), "model": st.just("BAAI/bge-m3"), "modelName": st.just("m3")},
    optional={
        "flavour": st.sampled_from(["cpu", "cuda"]),
        "gpus": st.integers(0, 2),
        "replicas": st.integers(0, 4),
        "upstream": st.sampled_from(["engine", "m3"]),
        "defaultFor": st.lists(st.sampled_from(["embed", "rerank"]), unique=True),
        "engineConfig": st.just({"dtype": "bfloat16", "queue_tokens": 4_000_000}),
        "weights": st.just({"existingClaim": "weights"}),
        "autoscaling": ON,
        "tolerations": st.just([{"key": "gpu", "operator": "Exists"}]),
        "nodeSelector": st.just({"gpu": "yes"}),
    },
)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "fullnameOverride": st.just("models"),
        "replicas": st.integers(1, 9),
        "image": st.sampled_from(
            [
                {"flavour": "gateway"},
                {"digest": f"sha256:{'a' * 64}"},
                {"pullSecrets": [{"name": "pull"}], "pullPolicy": "Always"},
            ]
        ),
        "config": st.just({"drain_s": 12.5, "tenants": {"a": {"limits": {"tokens_per_day": 10**12}}}}),
        "redis": st.one_of(
            st.just(
                {"enabled": False, "url": "redis+sentinel://:${file:/secrets/redis-password}@a:1,b:2/main/0"}
            ),
            st.just({"storageClass": "fast", "storage": "10Gi"}),
        ),
        "pools": st.one_of(
            st.fixed_dictionaries({"more": POOL}, optional={"engine": OFF, "tei": ON}),
            st.just({"engine": {"enabled": True, "autoscaling": {"enabled": True, "maxReplicas": 3}}}),
        ),
        "autoscaling": ON,
        "monitoring": st.sampled_from(
            [{"enabled": True}, {"enabled": True, "kind": "PodMonitor", "labels": {"release": "p"}}]
        ),
        "tls": st.just({"secretName": "certificate"}),
        "service": st.just({"type": "LoadBalancer", "annotations": {"a/b": "c"}}),
        "ingress": st.just(
            {"enabled": True, "hosts": ["a.example.com", "b.example.com"], "className": "nginx"}
        ),
        "networkPolicy": st.sampled_from(
            [{"enabled": False}, {"callers": [{"podSelector": {}}], "egress": [{"ports": [{"port": 443}]}]}]
        ),
        "podSecurityContext": st.just({"runAsUser": None, "runAsGroup": None, "fsGroup": None}),
        "priorityClassName": st.just("high"),
        "affinity": st.just({"nodeAffinity": {}}),
        "podLabels": st.just({"team": "search"}),
        "podAnnotations": st.just({"a/b": "c"}),
        "env": st.just([{"name": "HF_TOKEN", "value": "x"}]),
        "volumes": st.just([{"name": "more", "emptyDir": {}}]),
    },
).map(
    lambda values: (
        values | ({"volumeMounts": [{"name": "more", "mountPath": "/more"}]} if "volumes" in values else {})
    )
)


# A pair of two optional values is missing from all examples once in 300 runs.
@settings(max_examples=20)
@given(values=VALUES, name=st.sampled_from(["gateway", "team-a", "my-gateway-2"]))
def test_any_values_make_a_valid_release(
    values: dict[str, Any], name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_release(rendered(values, name), tmp_path_factory.mktemp("secrets"))


def deployment(values: Mapping[str, Any], name: str = NAME) -> Manifest:
    """Return the deployment of a name."""
    return Bundle(rendered(values), {}).named("Deployment", name)


def router(values: Mapping[str, Any]) -> Any:
    """Return the gateways' router.yaml."""
    return yaml.safe_load(
        Bundle(rendered(values), {}).named("ConfigMap", "gateway-config")["data"]["router.yaml"]
    )


def test_config_is_merged_over_what_the_chart_makes() -> None:
    made = router({"config": {"upstreams": {"minilm": {"queue_tokens": 10_000_000}}, "drain_s": 50}})

    assert 10_000_000 == made["upstreams"]["minilm"]["queue_tokens"]
    assert "dns" == made["upstreams"]["minilm"]["discover"]
    assert 50 == made["drain_s"]


def test_a_whole_file_is_served_as_it_is() -> None:
    text = (KUBERNETES / "overlays/tei/router.yaml").read_text()
    made = Bundle(rendered({"routerYaml": text, "pools": {"engine": {"enabled": False}}}), {})

    assert text.strip() == made.named("ConfigMap", "gateway-config")["data"]["router.yaml"].strip()
    assert {"gateway"} == {manifest["metadata"]["name"] for manifest in made.of_kind("Deployment")}


@pytest.mark.parametrize(("drain_s", "grace_s"), [(30, 60), (12.5, 43), (300, 330)])
def test_the_grace_period_follows_the_drain(drain_s: float, grace_s: int) -> None:
    pod = deployment({"config": {"drain_s": drain_s}})["spec"]["template"]["spec"]

    assert grace_s == pod["terminationGracePeriodSeconds"]
    assert "lifecycle" not in pod["containers"][0]


def test_a_file_without_lame_duck_keeps_the_pause_before_the_signal() -> None:
    text = (KUBERNETES / "overlays/tei/router.yaml").read_text()
    parts = [line for line in text.splitlines() if not line.startswith("lame_duck_s")]
    values = {"routerYaml": "\n".join(parts) + "\n", "pools": {"engine": {"enabled": False}}}
    pod = deployment(values)["spec"]["template"]["spec"]

    assert ["sleep", "10"] == pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert 60 == pod["terminationGracePeriodSeconds"]


def test_pools_pause_by_a_hook_only_if_they_run_another_server() -> None:
    values = {"pools": {"engine": {"enabled": True}, "tei": {"enabled": True}}}
    pods = [deployment(values, f"gateway-{pool}")["spec"]["template"]["spec"] for pool in ("engine", "tei")]

    assert [False, True] == ["lifecycle" in pod["containers"][0] for pod in pods]
    assert [90, 90] == [pod["terminationGracePeriodSeconds"] for pod in pods]


def test_pods_are_replaced_when_their_configuration_changes() -> None:
    def checksum(values: dict[str, Any], name: str) -> str:
        annotations = deployment(values, name)["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/config"])

    changed = {"config": {"drain_s": 31}}
    assert checksum({}, "gateway") != checksum(changed, "gateway")
    assert checksum({}, "gateway-engine") == checksum(changed, "gateway-engine")
    assert checksum({}, "gateway-engine") != checksum(
        {"pools": {"engine": {"engineConfig": {"dtype": "float32"}}}}, "gateway-engine"
    )


def test_tls_reaches_the_probes_the_service_and_prometheus() -> None:
    values = {"tls": {"secretName": "certificate"}, "monitoring": {"enabled": True}}
    made = Bundle(rendered(values), {})
    [container] = containers(made.named("Deployment", "gateway"))

    assert {"certificate": "/tls/tls.crt", "private_key": "/tls/tls.key"} == router(values)["tls"]
    assert {"HTTPS"} == {
        container[probe]["httpGet"]["scheme"] for probe in ("readinessProbe", "livenessProbe")
    }
    assert [443] == [port["port"] for port in made.named("Service", "gateway")["spec"]["ports"]]
    # Engines have no certificate.
    schemes = {
        monitor["metadata"]["name"]: monitor["spec"]["endpoints"][0].get("scheme", "http")
        for monitor in made.of_kind("ServiceMonitor")
    }
    assert {"gateway": "https", "gateway-engines": "http"} == schemes


KEYLESS: dict[str, Any] = {
    "config": {
        "grpc": {"listen": "0.0.0.0:9090"},
        "listeners": [
            {"address": "127.0.0.1:8091", "tenant": "a"},
            {"address": "0.0.0.0:8092", "tenant": "a"},
            {"address": "[::]:8093", "tenant": "b"},
        ],
        "tenants": {"a": {}, "b": {}},
    }
}
LOCAL = [{"podSelector": {"matchLabels": {"app": "weaviate"}}}]


def port_numbers(ports: list[dict[str, Any]]) -> list[int]:
    """Return the numbers of the ports of a rule."""
    return [port["port"] for port in ports]


@pytest.mark.parametrize("allowed", [[], LOCAL])
def test_further_listeners_have_ports_and_those_without_keys_a_service_of_their_own(
    allowed: list[Any], tmp_path: Path
) -> None:
    more = {"service": {"type": "LoadBalancer"}, "networkPolicy": {"keyless": allowed}}
    made = rendered(KEYLESS | more)
    check_release(made, tmp_path)
    whole = Bundle(made, {})
    [container] = containers(whole.named("Deployment", "gateway"))
    keyless = whole.named("Service", "gateway-keyless")["spec"]
    [callers, *others] = whole.named("NetworkPolicy", "gateway")["spec"]["ingress"]

    assert {"http": 8080, "operators": 8081, "grpc": 9090, "keyless-1": 8092, "keyless-2": 8093} == {
        port["name"]: port["containerPort"] for port in container["ports"]
    }
    named = {port["name"] for port in container["ports"]}
    assert {
        port["targetPort"] for service in whole.of_kind("Service") for port in service["spec"]["ports"]
    } <= (named | {"redis"})
    assert [80, 9090] == port_numbers(whole.named("Service", "gateway")["spec"]["ports"])
    assert ([8092, 8093], None) == (port_numbers(keyless["ports"]), keyless.get("type"))
    assert [8080, 9090] == port_numbers(callers["ports"])
    assert [rule["from"] for rule in others if 8092 in port_numbers(rule["ports"])] == (
        [allowed] if allowed else []
    )


def test_without_further_listeners_no_port_is_open() -> None:
    made = Bundle(rendered({"networkPolicy": {"keyless": LOCAL}}), {})
    [container] = containers(made.named("Deployment", "gateway"))

    assert ["http", "operators"] == [port["name"] for port in container["ports"]]
    assert {"gateway", "gateway-operators", "gateway-engine", "gateway-redis"} == {
        service["metadata"]["name"] for service in made.of_kind("Service")
    }
    assert "weaviate" not in str(made.of_kind("NetworkPolicy"))


def test_a_gpu_changes_the_image_and_the_limits() -> None:
    pool = {"flavour": "cuda", "gpus": 2}
    [container] = containers(deployment({"pools": {"engine": pool}}, "gateway-engine"))

    assert f"registry.example.com/embedding-gateway:{__version__}-cuda" == container["image"]
    assert {"memory": "4Gi", "nvidia.com/gpu": 2} == container["resources"]["limits"]


def test_a_digest_is_used_for_its_own_flavour_only() -> None:
    digest = f"sha256:{'a' * 64}"

    def images(pool: dict[str, Any]) -> list[str]:
        values = {"image": {"digest": digest}, "pools": {"engine": pool}}
        pods = Bundle(rendered(values), {}).of_kind("Deployment")
        return sorted(container["image"] for pod in pods for container in containers(pod))

    repository = "registry.example.com/embedding-gateway"
    assert [f"{repository}@{digest}"] * 2 == images({})
    assert [f"{repository}:{__version__}-cuda", f"{repository}@{digest}"] == images({"flavour": "cuda"})
    other = f"sha256:{'b' * 64}"
    assert [f"{repository}@{digest}", f"{repository}@{other}"] == images({"flavour": "cuda", "digest": other})


def test_two_releases_of_a_namespace_share_no_object_and_no_pod() -> None:
    first, second = rendered({}, "team-a"), rendered({}, "team-b")

    def names(made: list[Manifest]) -> set[tuple[str, str]]:
        return {(manifest["kind"], manifest["metadata"]["name"]) for manifest in made}

    assert not names(first) & names(second)
    for service in Bundle(first, {}).of_kind("Service"):
        selector = service["spec"]["selector"].items()
        assert not [pod for pod in Bundle(second, {}).pods() if selector <= labels_of(pod).items()]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replica": 2}, "'replica' not allowed"),
        ({"config": {"limitz": {}}}, "'limitz' not allowed"),
        ({"config": {"upstreams": {"minilm": {"backend": "tie"}}}}, "/config/upstreams/minilm/backend"),
        ({"pools": {"engine": {"enabled": False}}}, "no model is served: enable one of `pools`"),
        ({"redis": {"enabled": False}}, "no store for quotas and keys"),
        ({"config": {"listen": "0.0.0.0:80"}}, "config: `listen` has to be 0.0.0.0:8080"),
        ({"routerYaml": "models: {}"}, "routerYaml: `listen` has to be 0.0.0.0:8080"),
        ({"routerYaml": "models: {"}, "routerYaml is no YAML"),
        ({"pools": {"a": {"kind": "vllm", "model": "m"}}}, "/pools/a"),
        ({"pools": {"a": {"kind": "tei", "model": "m", "engineConfig": {}}}}, "/pools/a"),
        ({"pools": {"a": {"kind": "engine"}}}, "missing property 'model'"),
        ({"pools": {"redis": {"kind": "engine", "model": "m"}}}, "invalid propertyName 'redis'"),
        ({"ingress": {"enabled": True}}, "/ingress/hosts"),
        ({"image": {"digest": "sha256:1"}}, "/image/digest"),
        ({"monitoring": {"kind": "PodMonitors"}}, "/monitoring/kind"),
    ],
)
def test_mistakes_are_refused_with_their_place(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError) as caught:
        rendered(values)

    assert message in str(caught.value)


def test_versions_are_that_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    [image] = yaml.safe_load((KUBERNETES / "components/image/kustomization.yaml").read_text())["images"]

    assert {__version__} == {chart["version"], chart["appVersion"], image["newTag"]}


def test_every_value_is_in_the_schema_with_a_default() -> None:
    with helm.Chart.load(CHART) as chart:
        schema, defaults = chart.schema, chart.values

    assert schema is not None
    assert set(schema["properties"]) - {"global"} == set(defaults)
