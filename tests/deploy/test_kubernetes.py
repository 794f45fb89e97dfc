"""The Kubernetes manifests fit the API, one another, and the gateway that they run."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gateway.app import ROUTES
from gateway.config.load import parse_config
from gateway.config.schema import Config, host_and_port
from gateway.processes.engine_process import KILL_AFTER_S
from tests.deploy.manifests import KUBERNETES, OVERLAYS, ROOT, Bundle, Manifest, bundle, containers, labels_of
from tests.waiting import PATIENCE_S

# The oldest supported release of Kubernetes.
RELEASE = "1.30"
SECRETS = {
    "redis-password": "random text",
    "upstream-key": "another random text",
    "metrics-key-digest": f"sha256:{'0' * 64}",
    "admin-key-digest": f"sha256:{'1' * 64}",
}
# Kinds of other projects, for which Kubernetes has no schema.
FOREIGN = {"ScaledObject", "ServiceMonitor"}
# Time for workers, engines and a final kill, each of which the supervisor bounds.
ENDING_S = 3 * KILL_AFTER_S


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> Bundle:
    return bundle(KUBERNETES / "overlays" / request.param)


def config_of(files: dict[str, Path], tmp_path: Path) -> Config:
    """Parse the router.yaml of a ConfigMap, with secrets in files as the pods have them."""
    for name, value in SECRETS.items():
        (tmp_path / name).write_text(value)
    text = files["router.yaml"].read_text().replace("/secrets/", f"{tmp_path}/")
    return parse_config(text, {}, tmp_path)


def gateways(overlay: Bundle) -> Iterator[tuple[Manifest, str]]:
    """Yield the deployments of this project's image, each with the name of its ConfigMap."""
    for manifest in overlay.pods():
        [container] = containers(manifest)
        if container["image"] == "embedding-gateway":
            volumes = {volume["name"]: volume for volume in manifest["spec"]["template"]["spec"]["volumes"]}
            yield manifest, volumes["config"]["configMap"]["name"]


def test_manifests_fit_the_kubernetes_schemas(overlay: Bundle) -> None:
    ours = [manifest for manifest in overlay.manifests if manifest["kind"] not in FOREIGN]

    assert len(ours) > 10
    for manifest in ours:
        kubernetes_validate.validate(manifest, RELEASE, strict=True)


def test_validation_detects_a_wrong_manifest() -> None:
    manifest = bundle(KUBERNETES / "overlays" / "engine").named("Deployment", "gateway")
    manifest["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, RELEASE, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
@pytest.mark.parametrize("name", OVERLAYS)
def test_kubectl_builds_the_same_objects(name: str) -> None:
    folder = KUBERNETES / "overlays" / name
    kustomize = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, check=True, timeout=PATIENCE_S, text=True
    )
    manifests = [built for built in yaml.safe_load_all(kustomize.stdout) if built["kind"] != "ConfigMap"]

    assert {(manifest["kind"], manifest["metadata"]["name"]) for manifest in bundle(folder).manifests} == {
        (manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests
    }
    assert {"embedding-gateway"} == {
        manifest["metadata"].get("namespace", "embedding-gateway") for manifest in manifests
    }
    for manifest in manifests:
        if manifest["kind"] not in FOREIGN:
            kubernetes_validate.validate(manifest, RELEASE, strict=True)
    fixed = {manifest["metadata"]["name"] for manifest in manifests if "replicas" in manifest.get("spec", {})}
    assert ({"redis"} if name.endswith("-scaled") else {"redis", "gateway", name}) == fixed


@pytest.mark.parametrize("name", ["engine", "tei"])
def test_the_image_is_set_for_every_object_of_an_overlay(name: str) -> None:
    kustomization = yaml.safe_load((KUBERNETES / "overlays" / name / "kustomization.yaml").read_text())
    base = yaml.safe_load((KUBERNETES / "base/kustomization.yaml").read_text())

    # In the base it would leave out the engine's pods.
    assert "images" not in base
    assert "../../components/image" in kustomization["components"]


def test_gateway_accepts_the_configs(overlay: Bundle, tmp_path: Path) -> None:
    served = list(gateways(overlay))

    assert served
    for _, config in served:
        assert config_of(overlay.configs[config], tmp_path).models


def test_container_ports_match_the_config(overlay: Bundle, tmp_path: Path) -> None:
    for manifest, name in gateways(overlay):
        config = config_of(overlay.configs[name], tmp_path)
        [container] = containers(manifest)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert config.admin.listen is not None
        assert {
            "http": host_and_port(config.listen)[1],
            "operators": host_and_port(config.admin.listen)[1],
        } == ports


def test_probe_paths_are_served(overlay: Bundle) -> None:
    for manifest, _ in gateways(overlay):
        [container] = containers(manifest)
        probes = {name: probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")}
        assert {"readinessProbe", "livenessProbe"} == set(probes)
        assert ("/readyz", "/livez") == (probes["readinessProbe"]["path"], probes["livenessProbe"]["path"])
        assert all(ROUTES.parse(probe["path"]).options.on_both_listeners for probe in probes.values())
        assert {"http"} == {probe["port"] for probe in probes.values()}


def test_grace_period_covers_pause_drain_and_exit(overlay: Bundle, tmp_path: Path) -> None:
    for manifest, name in gateways(overlay):
        [container] = containers(manifest)
        # The gateway's own pause: a hook would need a shell in the image.
        assert "lifecycle" not in container
        config = config_of(overlay.configs[name], tmp_path)
        grace_s = manifest["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert config.lame_duck_s >= 10
        assert grace_s >= config.lame_duck_s + config.drain_s + ENDING_S


def test_selectors_match_their_pods(overlay: Bundle) -> None:
    pods = overlay.pods()
    for manifest in pods:
        assert manifest["spec"]["selector"]["matchLabels"].items() <= labels_of(manifest).items()
        for spread in manifest["spec"]["template"]["spec"].get("topologySpreadConstraints", []):
            assert spread["labelSelector"]["matchLabels"].items() <= labels_of(manifest).items()
    for manifest in overlay.of_kind("Service", "PodDisruptionBudget", "NetworkPolicy"):
        for selector in _pod_selectors(manifest["spec"]):
            assert any(selector.items() <= labels_of(pod).items() for pod in pods), selector


def test_services_target_existing_ports(overlay: Bundle) -> None:
    for service in overlay.of_kind("Service"):
        selector = service["spec"]["selector"].items()
        [target] = [pod for pod in overlay.pods() if selector <= labels_of(pod).items()]
        ports = {port["name"] for container in containers(target) for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_every_deployment_has_a_disruption_budget(overlay: Bundle) -> None:
    budgets = [budget["spec"]["selector"]["matchLabels"] for budget in overlay.of_kind("PodDisruptionBudget")]
    deployments = overlay.of_kind("Deployment")

    assert len(deployments) == len(budgets)
    for manifest in deployments:
        assert manifest["spec"]["selector"]["matchLabels"] in budgets


def test_replicas_and_store_are_services_of_the_namespace(overlay: Bundle, tmp_path: Path) -> None:
    config = config_of(overlay.configs["gateway-config"], tmp_path)
    services = {service["metadata"]["name"]: service["spec"] for service in overlay.of_kind("Service")}

    assert config.quotas.store.endswith("@redis:6379/0")
    for upstream in config.upstreams.values():
        assert "dns" == upstream.discover
        for url in upstream.replicas:
            address = re.fullmatch(r"http://([\w-]+):(\d+)", url)
            assert address is not None
            service = services[address[1]]
            # Only a headless service's name has each pod's address.
            assert "None" == service["clusterIP"]
            assert int(address[2]) in {port["port"] for port in service["ports"]}


def test_network_policies_allow_the_traffic_of_pods(overlay: Bundle) -> None:
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in overlay.of_kind("NetworkPolicy")}
    upstreams = [pod for pod in overlay.pods() if "app.kubernetes.io/component" in labels_of(pod)]

    assert {"nothing", "names", "gateway", "redis", "upstream"} == set(policies)
    assert {} == policies["nothing"]["podSelector"]
    assert len(upstreams) == 1
    for manifest in upstreams:
        assert policies["upstream"]["podSelector"]["matchLabels"].items() <= labels_of(manifest).items()


def test_pods_have_minimal_rights(overlay: Bundle) -> None:
    for manifest in overlay.pods():
        pod = manifest["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        for container in containers(manifest):
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"]
            assert not rights["allowPrivilegeEscalation"]
            assert ["ALL"] == rights["capabilities"]["drop"]
            assert {"requests", "limits"} == set(container["resources"])


def test_files_hold_no_secret_and_the_documented_command_creates_all(
    overlay: Bundle,
) -> None:
    document = (ROOT / "docs/kubernetes.md").read_text()
    created = set(re.findall(r"--from-literal=([\w-]+)=", document))
    used = set(_secret_keys(overlay.manifests))
    for files in overlay.configs.values():
        for path in files.values():
            used |= set(re.findall(r"\$\{file:/secrets/([\w-]+)\}", path.read_text()))

    assert not overlay.of_kind("Secret")
    assert {"redis-password", "upstream-key", "first-key", "metrics-key-digest", "admin-key-digest"} <= used
    assert used <= created


@pytest.mark.parametrize("name", ["engine", "tei"])
def test_scalers_query_existing_metrics_of_existing_upstreams(name: str, tmp_path: Path) -> None:
    scaled = bundle(KUBERNETES / "overlays" / f"{name}-scaled")
    config = config_of(scaled.configs["gateway-config"], tmp_path)
    documented = set(re.findall(r"`(gateway_\w+)`", (ROOT / "docs/metrics.md").read_text()))
    [scaler] = scaled.of_kind("ScaledObject")
    queries = [trigger["metadata"]["query"] for trigger in scaler["spec"]["triggers"]]

    assert scaler["spec"]["scaleTargetRef"]["name"] in {
        deployment["metadata"]["name"] for deployment in scaled.of_kind("Deployment")
    }
    assert 0 == scaler["spec"]["minReplicaCount"]
    for query in queries:
        assert set(re.findall(r"gateway_\w+", query)) <= documented
        assert set(re.findall(r'upstream="([^"]+)"', query)) == set(config.upstreams)
    # The gateway has already counted the requests that wait in an engine's own lane.
    for other in set(scaled.configs) - {"gateway-config"}:
        assert not set(config.upstreams) & set(config_of(scaled.configs[other], tmp_path).upstreams)
    # A gateway that refused requests without a replica would never show a demand for one.
    assert {"wait"} == {upstream.when_unavailable for upstream in config.upstreams.values()}


def test_prometheus_scrapes_with_the_configured_key(tmp_path: Path) -> None:
    scaled = bundle(KUBERNETES / "overlays" / "engine-scaled")
    monitor = scaled.named("ServiceMonitor", "gateway")
    [endpoint] = monitor["spec"]["endpoints"]
    selector = monitor["spec"]["selector"]["matchLabels"].items()
    scraped = [
        service
        for service in scaled.of_kind("Service")
        if selector <= service["metadata"].get("labels", {}).items()
    ]

    assert {"gateway-operators", "engine"} == {service["metadata"]["name"] for service in scraped}
    for service in scraped:
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert {"name": "gateway-secrets", "key": "metrics-key"} == endpoint["authorization"]["credentials"]
    key, _ = config_of(scaled.configs["gateway-config"], tmp_path).admin.keys
    assert not isinstance(key, str)
    assert (SECRETS["metrics-key-digest"], ("metrics",)) == (key.digest, key.scopes)


def test_operators_have_a_key_of_their_own(overlay: Bundle, tmp_path: Path) -> None:
    keys = config_of(overlay.configs["gateway-config"], tmp_path).admin.keys
    [operators] = [key for key in keys if not isinstance(key, str) and key.id == "operators"]

    assert SECRETS["admin-key-digest"] == operators.digest
    # Every scope of an operator: admin and metrics.
    assert operators.scopes is None


def _pod_selectors(spec: Any) -> Iterator[dict[str, str]]:
    """Yield the labels of every pod selector in a spec, and of a service's own selector."""
    if isinstance(spec, list):
        for item in spec:
            yield from _pod_selectors(item)
    elif isinstance(spec, dict):
        for name, item in spec.items():
            if name in {"selector", "podSelector"}:
                yield item.get("matchLabels", {} if name == "podSelector" or "matchLabels" in item else item)
            else:
                yield from _pod_selectors(item)


def _secret_keys(value: Any) -> Iterator[str]:
    """Yield the keys of the secret that environments and volumes refer to."""
    if isinstance(value, list):
        for item in value:
            yield from _secret_keys(item)
    elif isinstance(value, dict):
        if value.get("name") == "gateway-secrets" and "key" in value:
            yield value["key"]
        elif value.get("secretName") == "gateway-secrets":
            yield from (item["key"] for item in value["items"])
        for item in value.values():
            yield from _secret_keys(item)
