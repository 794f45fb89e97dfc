"""/metrics: names follow Prometheus' conventions, and callers cannot add labels."""

import asyncio
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, Histogram, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families

from gateway.config.schema import Tracing
from gateway.events import CallFinished, ConnectionFaulted, QuotaDecided, ReplicaChanged
from gateway.telemetry import call_metrics
from gateway.telemetry.call_metrics import TENANTS_MAX
from gateway.telemetry.instruments import BatchedHistogram
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.tracing import create_traces
from gateway.telemetry.upstream_metrics import ReplicaLoad, Sources
from gateway.tenants.keyring import key_digest
from tests.conftest import CONFIG, KEY, Boots, Running
from tests.fakes.hooks import Gate, respond_with, tei_with_hook, until
from tests.fakes.hooks import embedder_and_reranker as fakes
from tests.fakes.tei import FakeTei
from tests.waiting import PATIENCE_S

OPENAI = "/v1/embeddings"
TRACE = "0af7651916cd43dd8448eb211c80319c"
# Every label is listed here, so that adding one is a deliberate choice.
LABELS = {"route", "status", "outcome", "tenant", "key", "model", "upstream", "replica", "decision", "le"}
LABELS |= {"stage", "state", "version", "fault", "owner", "currency", "certificate"}


async def scrape(gateway: Running) -> list[Metric]:
    """Return the families of the gateway itself."""
    reply = await gateway.client.get("/metrics", headers={"host": "localhost"})
    assert 200 == reply.status_code
    families = text_string_to_metric_families(reply.text)
    return [family for family in families if not family.name.startswith(("process_", "python_"))]


def value(families: list[Metric], name: str, **labels: str) -> float:
    """Return the sum of all samples of a name with these labels."""
    values = [
        entry.value
        for family in families
        for entry in family.samples
        if entry.name == name and labels.items() <= entry.labels.items()
    ]
    assert values, f"no {name} {labels}"
    return sum(values)


def label_values(families: list[Metric]) -> Iterator[str]:
    """Yield the value of every label."""
    for family in families:
        for sample in family.samples:
            yield from sample.labels.values()


async def test_metric_names_follow_prometheus_conventions(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        await gateway.post(OPENAI, {"input": "a"})
        families = await scrape(gateway)

    assert families
    for family in families:
        assert re.fullmatch(r"gateway(_[a-z]+)+", family.name), family.name
        assert not re.search(r"_(ms|milliseconds|us|minutes|kb|mb|count|sum|bucket|total)$", family.name)
        assert family.documentation, f"{family.name} has no help"
        assert family.documentation.endswith("."), family.name
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_tokens", "_inputs", "_bytes", "_calls", "_cosine")), (
                family.name
            )


async def test_labels_are_snake_case_and_known(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        await gateway.post(OPENAI, {"input": "a"})
        families = await scrape(gateway)

    used = {label for family in families for family in family.samples for label in family.labels}
    assert used <= LABELS


async def test_counts_a_call_once(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        for _ in range(3):
            await gateway.post(OPENAI, {"input": ["one two", "three"]})
        families = await scrape(gateway)

    assert 3 == value(families, "gateway_calls_total", route=OPENAI, status="200", outcome="ok")
    assert 3 * 7 == value(families, "gateway_tokens_total", tenant="default", model="bge")
    assert 3 * 2 == value(families, "gateway_inputs_total", tenant="default", model="bge")
    assert 3 == value(families, "gateway_attempts_total", upstream="embedder", outcome="ok")
    assert 3 == value(families, "gateway_quota_decisions_total", tenant="default", decision="admitted")
    assert 3 == value(families, "gateway_call_duration_seconds_count", route=OPENAI)
    assert 3 == value(families, "gateway_model_duration_seconds_count", model="bge")
    assert 3 == value(families, "gateway_tenant_duration_seconds_count", tenant="default")


async def test_counts_failures_by_kind(boot: Boots) -> None:
    async with boot({"tei-0": tei_with_hook(respond_with(500))}) as gateway:
        await gateway.post(OPENAI, {"input": ""})
        await gateway.post(OPENAI, {"input": "a", "model": "nowhere"})
        await gateway.post("/embed", {"inputs": "a"})
        families = await scrape(gateway)

    assert 1 == value(families, "gateway_calls_total", outcome="empty_input", status="400")
    assert 1 == value(families, "gateway_calls_total", outcome="model_not_found", status="404")
    assert 1 == value(families, "gateway_calls_total", outcome="upstream_failed", route="/embed")
    assert 1 <= value(families, "gateway_attempts_total", outcome="failed")


async def test_shows_a_dead_replica_as_down(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        families = await scrape(gateway)

    assert 1 == value(families, "gateway_replica_up", replica="http://tei-0")
    assert 0 == value(families, "gateway_replica_up", replica="http://tei-1")


async def test_removed_replica_has_no_gauges() -> None:
    loads = [ReplicaLoad("embedder", name, 1, 6) for name in ("stays", "goes")]
    metrics = Metrics(is_open=True)
    metrics.watch(Sources(replicas=lambda: loads))
    for name in ("stays", "goes"):
        metrics.observe(ReplicaChanged("embedder", name, "up"))
    before, _ = await metrics.render()
    metrics.observe(ReplicaChanged("embedder", loads.pop().replica, "gone"))
    after, _ = await metrics.render()

    gauges = re.compile(rb'gateway_replica_(?:up|window_batches|in_flight_batches){.*replica="(\w+)"')
    assert [b"goes"] * 3 + [b"stays"] * 3 == sorted(gauges.findall(before))
    assert [b"stays"] * 3 == gauges.findall(after)


async def test_counts_faults_of_connections_by_kind() -> None:
    metrics = Metrics(is_open=True)
    for kind in ("stale", "stale", "unsolicited"):
        metrics.observe(ConnectionFaulted("embedder", "tei-0", kind))  # type: ignore[arg-type]
    text, _ = await metrics.render()

    labels = b'replica="tei-0",upstream="embedder"'
    assert b'gateway_connection_faults_total{fault="stale",%b} 2.0' % labels in text
    assert b'gateway_connection_faults_total{fault="unsolicited",%b} 1.0' % labels in text


async def test_measures_batches_and_stages(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        await gateway.post(OPENAI, {"input": ["a", "b", "c", "d", "e"]})
        families = await scrape(gateway)

    assert 5 == value(families, "gateway_upstream_request_inputs_sum", upstream="embedder")
    assert 2 == value(families, "gateway_upstream_request_inputs_count", upstream="embedder")
    assert 2 == value(families, "gateway_batch_calls_sum", upstream="embedder")
    assert 1 == value(families, "gateway_tenant_calls_total", tenant="default", model="bge")
    stages = {"parse", "auth", "quota", "queue", "upstream", "encode"}
    assert {1} == {value(families, "gateway_stage_duration_seconds_count", stage=stage) for stage in stages}


async def test_counts_calls_by_key_and_bounds_the_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_metrics, "KEYS_MAX", 30)
    metrics = Metrics(is_open=True)
    for number in range(30 + 20):
        outcome = "ok" if number % 2 else "invalid_input"
        metrics.observe(
            CallFinished(
                "id", "POST", "/embed", 200, outcome, 0.1, "acme", "bge", 1, 7, key_id=f"key-{number}"
            )
        )
        metrics.collected()
    text, _ = await metrics.render()
    lines = [line for line in text.decode().splitlines() if line.startswith("gateway_key_tokens_total")]

    assert len(lines) == 30 + 1
    assert 'gateway_key_calls_total{key="key-1",outcome="ok",tenant="acme"} 1.0' in text.decode()
    assert 'gateway_key_calls_total{key="key-2",outcome="failed",tenant="acme"} 1.0' in text.decode()
    assert 'gateway_key_tokens_total{key="other",tenant="other"} 140.0' in text.decode()


async def test_bounds_the_number_of_tenants() -> None:
    metrics = Metrics(is_open=True)
    for number in range(TENANTS_MAX + 20):
        tenant = f"tenant-{number}"
        metrics.observe(CallFinished("id", "POST", "/embed", 429, "overloaded", 0.1, tenant, "bge", 1, 7))
        metrics.observe(QuotaDecided(tenant, "admitted"))
    text, _ = await metrics.render()
    families = list(text_string_to_metric_families(text.decode()))

    for name in ("gateway_tokens_total", "gateway_tenant_failures_total", "gateway_quota_decisions_total"):
        series = [sample for family in families for sample in family.samples if sample.name == name]
        assert len(series) == TENANTS_MAX + 1
    assert 1 == value(families, "gateway_tenant_failures_total", tenant="tenant-1", outcome="overloaded")
    assert 20 * 7 == value(families, "gateway_tokens_total", tenant="other")
    assert 20 == value(families, "gateway_tenant_duration_seconds_count", tenant="other")


async def test_links_buckets_to_recorded_traces_in_openmetrics(boot: Boots) -> None:
    processor = SimpleSpanProcessor(InMemorySpanExporter())
    headers = {"host": "localhost", "accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
    async with boot({"tei-0": FakeTei()}, traces=create_traces(Tracing(sample=0.0), processor)) as gateway:
        traced = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        await gateway.client.post(OPENAI, json={"input": "b"}, headers=traced)
        await gateway.post(OPENAI, {"input": "not recorded, and slower than the first if it is"})
        linked = await gateway.client.get("/metrics", headers=headers)
        plain = await gateway.client.get("/metrics", headers={"host": "localhost"})
    exemplars = {
        (sample.name, sample.exemplar.labels["trace_id"])
        for family in open_metrics_families(linked.text)
        for sample in family.samples
        if sample.exemplar
    }

    assert linked.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    histograms = ("call", "model", "tenant", "attempt")
    assert {(f"gateway_{name}_duration_seconds_bucket", TRACE) for name in histograms} == exemplars
    assert plain.headers["content-type"].startswith("text/plain")
    assert TRACE not in plain.text


async def test_serves_no_openmetrics_without_traces(boot: Boots) -> None:
    headers = {"host": "localhost", "accept": "application/openmetrics-text;version=1.0.0"}
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.client.get("/metrics", headers=headers)

    assert reply.headers["content-type"].startswith("text/plain")


async def test_shows_what_the_configuration_is(boot: Boots) -> None:
    config = "currency: EUR\n" + CONFIG.replace(
        "bge: {upstream: embedder}", "bge: {upstream: embedder, price_per_million_tokens: 20}", 1
    )
    async with boot({"tei-0": FakeTei()}, config) as gateway:
        families = await scrape(gateway)

    assert 0.00002 == value(families, "gateway_token_price", model="bge", currency="EUR")
    assert 0 < value(families, "gateway_config_digest") < 2**48
    assert 1 == value(families, "gateway_replica_slowness_ratio", replica="http://tei-0")


async def test_shows_the_age_of_the_oldest_queued_input(boot: Boots) -> None:
    gate = Gate()
    config = CONFIG.replace("embedder: {", "embedder: {in_flight_batches: 1, ")
    async with boot({"tei-0": tei_with_hook(gate)}, config) as gateway:
        calls = [asyncio.create_task(gateway.post(OPENAI, {"input": "a"}))]
        await until(lambda: gate.waiting == 1)
        calls.append(asyncio.create_task(gateway.post(OPENAI, {"input": "b"})))
        async with asyncio.timeout(PATIENCE_S):
            while not value(await scrape(gateway), "gateway_lane_oldest_seconds", upstream="embedder"):
                pass
        families = await scrape(gateway)
        gate.opened.set()
        await asyncio.gather(*calls)

    assert 1 == value(families, "gateway_lane_queued_inputs", upstream="embedder")
    assert 1 == value(families, "gateway_replica_in_flight_batches", replica="http://tei-0")
    assert 1 == value(families, "gateway_replica_window_batches", replica="http://tei-0")
    # Requests for /metrics are not counted.
    assert 2 == value(families, "gateway_calls_in_flight")


async def test_no_label_repeats_text_of_a_caller(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        for path in ["/madeup", "/v1/madeup", "/v1/models/madeup", "/models/madeup/embed"]:
            await gateway.client.get(path)
            await gateway.client.post(path, json={"inputs": "a"})
        await gateway.client.get("/models/bge/madeup")
        await gateway.client.get("/models/bge/madeup/info")
        await gateway.client.request("MADEUP", OPENAI)
        await gateway.post(OPENAI, {"input": "madeup", "model": "madeup"}, x_request_id="madeup")
        await gateway.post(OPENAI, {"input": "a", "user": "madeup"}, authorization="Bearer madeup")
        families = await scrape(gateway)

    assert [] == [label for label in label_values(families) if "madeup" in label.lower()]


async def test_number_of_series_does_not_depend_on_requests(boot: Boots) -> None:
    async def series(gateway: Running) -> int:
        return sum(len(family.samples) for family in await scrape(gateway))

    async def ask(gateway: Running, number: int) -> None:
        for path in (f"/x{number}", f"/models/x{number}/embed", f"/models/bge/x{number}", f"/v1/x{number}"):
            await gateway.client.get(path)
        await gateway.post(OPENAI, {"input": "a", "model": f"x{number}"})

    async with boot({"tei-0": FakeTei()}) as gateway:
        await series(gateway)
        await ask(gateway, 0)
        series_before = await series(gateway)
        for number in range(1, 20):
            await ask(gateway, number)

        assert series_before == await series(gateway)


async def test_labels_name_tenants_and_aliases_as_the_config_does(boot: Boots) -> None:
    config = f'{CONFIG}\ntenants: {{acme: {{keys: ["{key_digest(KEY)}"]}}}}\n'
    async with boot({"tei-0": FakeTei()}, config) as gateway:
        await gateway.post("/models/org%2Fbge/embed", {"inputs": "a"})
        families = await scrape(gateway)

    assert 3 == value(families, "gateway_tokens_total", tenant="acme", model="org/bge")
    assert 1 == value(families, "gateway_calls_total", route="/models/{model}/embed")


async def test_call_of_a_disconnected_caller_is_not_counted_as_ok(boot: Boots) -> None:
    gate = Gate()
    async with boot({"tei-0": tei_with_hook(gate)}) as gateway:
        call = asyncio.create_task(gateway.post(OPENAI, {"input": "a"}))
        await until(lambda: gate.waiting == 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    (event,) = [
        event for event in gateway.events if isinstance(event, CallFinished) and event.route == OPENAI
    ]
    assert "ok" != event.outcome


async def test_shows_queued_tokens_while_they_wait(boot: Boots) -> None:
    gate = Gate()
    config = CONFIG.replace("embedder: {", "embedder: {in_flight_batches: 1, ")
    async with boot({"tei-0": tei_with_hook(gate)}, config) as gateway:
        calls = [asyncio.create_task(gateway.post(OPENAI, {"input": "abc"}))]
        await until(lambda: gate.waiting == 1)
        calls.append(asyncio.create_task(gateway.post(OPENAI, {"input": "def"})))
        queued = 0.0
        async with asyncio.timeout(PATIENCE_S):
            while not queued:
                queued = value(await scrape(gateway), "gateway_lane_queued_tokens", upstream="embedder")
        gate.opened.set()
        await asyncio.gather(*calls)
        after = value(await scrape(gateway), "gateway_lane_queued_tokens", upstream="embedder")

    # Three bytes and the special tokens that any tokenizer may add.
    assert (7, 0) == (queued, after)


@pytest.mark.parametrize(
    ("listen", "status"), [("127.0.0.1:8080", 200), ("localhost:8080", 200), ("0.0.0.0:8080", 401)]
)
async def test_metrics_are_open_on_the_loopback_interface_only(boot: Boots, listen: str, status: int) -> None:
    async with boot({"tei-0": FakeTei()}, f"listen: {listen}\n{CONFIG}") as gateway:
        hosts = ("127.0.0.1:8080", "localhost", "10.0.0.7:8080", "[::1]:8080", "LOCALHOST:8080")
        replies = [
            await gateway.client.get("/metrics", headers={"authorization": "", "host": host})
            for host in hosts
        ]
        with_key = await gateway.client.get("/metrics")

    assert [status] * len(hosts) == [reply.status_code for reply in replies]
    assert 200 == with_key.status_code


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "localhost.evil.example", "[::1].evil.example", "", "a@[::1]"],
)
async def test_metrics_need_a_key_under_a_foreign_host_name(boot: Boots, host: str) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.client.get("/metrics", headers={"authorization": "", "host": host})
        with_key = await gateway.client.get("/metrics", headers={"host": host})

    assert (401, 200) == (reply.status_code, with_key.status_code)


@pytest.mark.parametrize(
    "header", ["x-forwarded-for", "via", "forwarded", "x-real-ip", "x-forwarded-proto", "origin"]
)
async def test_metrics_need_a_key_through_a_proxy(boot: Boots, header: str) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        headers = {"host": "127.0.0.1", header: "203.0.113.7"}
        reply = await gateway.client.get("/metrics", headers={**headers, "authorization": ""})
        with_key = await gateway.client.get("/metrics", headers=headers)

    assert (401, 200) == (reply.status_code, with_key.status_code)


async def test_no_event_contains_inputs_or_keys(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        await gateway.post(OPENAI, {"input": "a secret text"})
        await gateway.post(OPENAI, {"input": ["a secret text", ""]})
        events = repr(gateway.events)

    assert "CallFinished" in events
    assert "secret" not in events
    assert KEY not in events


@given(st.lists(st.one_of(st.sampled_from([0.0, 0.1, 0.5, 2.0, 2.1, 1e9]), st.floats(0, 3))))
def test_batched_observations_equal_single_ones(amounts: list[float]) -> None:
    registries = CollectorRegistry(), CollectorRegistry()
    single = Histogram("taken", "-", ["a"], buckets=(0.1, 0.5, 2), registry=registries[0]).labels("x")
    batched = BatchedHistogram("taken", "-", ["a"], buckets=(0.1, 0.5, 2), registry=registries[1]).labels("x")
    for amount in amounts:
        single.observe(amount)
    batched.observe_many(amounts)
    expected, got = (
        {(sample.name, tuple(sample.labels.items())): sample.value for sample in family.samples}
        for registry in registries
        for family in registry.collect()
    )
    assert got == pytest.approx(expected)


async def test_batched_counts_are_complete_on_render() -> None:
    metrics = Metrics(is_open=True)
    for _ in range(300):
        metrics.observe(CallFinished("id", "POST", OPENAI, 200, "ok", 0.25, "a", "m", 2, 5))
    families = list(text_string_to_metric_families((await metrics.render())[0].decode()))
    assert 300 == value(families, "gateway_calls_total", route=OPENAI)
    assert 300 == value(families, "gateway_call_duration_seconds_count", route=OPENAI)
    assert 1500 == value(families, "gateway_tokens_total", tenant="a", model="m")
