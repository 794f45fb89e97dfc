"""A running gateway reloads router.yaml on a signal, on request, or when the file has changed."""

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.callers import Callers, is_logged, status
from tests.processes.conftest import KEY, Served, wait_until
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

CONFIG = """
listen: 127.0.0.1:0
workers: {workers}
quotas: {{store: "{store}"}}
reload: {{watch: {watch}}}
upstreams: {upstreams}
models: {models}
"""
SECRET = "a-secret-that-no-log-may-hold"


class Operator:
    """Writer of valid and invalid versions of router.yaml."""

    def __init__(self, path: Path, urls: list[str], store: str, workers: int) -> None:
        self.path = path
        self._urls = urls
        self._fixed = {"store": store, "workers": workers}

    def write(self, number: int = 0, *, models: tuple[str, ...] = ("m",), watch: bool = False) -> None:
        """Write a valid file. number: selects the replicas, the settings and a second upstream."""
        first = f"backend: tei, replicas: {self._replicas(number)}, queue_tokens: {4000 + number // 3}"
        upstreams = f'{{one: {{{first}, api_key: "{SECRET}"}}, x{number % 2}: {{backend: tei, replicas: '
        upstreams += f"{self._replicas(number + 1)}}}}}"
        named = ", ".join(f"{name}: {{upstream: one}}" for name in models)
        text = CONFIG.format(
            upstreams=upstreams, models=f"{{{named}}}", watch=str(watch).lower(), **self._fixed
        )
        self._put(text)

    def write_broken(self) -> None:
        """Write a file with two problems."""
        self._put(self.path.read_text().replace("upstream: one", "upstream: none") + "\nno_such_key: 1\n")

    def _put(self, text: str) -> None:
        new_file = self.path.with_suffix(".new")
        new_file.write_text(text)
        new_file.replace(self.path)

    def _replicas(self, number: int) -> str:
        chosen = [self._urls, self._urls[:1], self._urls[1:]][number % 3]
        return str(chosen).replace("'", '"')


@pytest.fixture(scope="module")
def urls() -> Iterator[list[str]]:
    with ExitStack() as held:
        yield [held.enter_context(serve_in_thread(FakeTei())) for _ in range(2)]


@pytest.fixture(scope="module")
def shared(urls: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Operator]]:
    """Serve one gateway to the tests that leave it running."""
    writer = Operator(tmp_path_factory.mktemp("shared") / "router.yaml", urls, "memory", 1)
    writer.write()
    running = Served(writer.path).wait_until_up()
    yield running, writer
    running.stop()


@pytest.fixture
def operator(shared: tuple[Served, Operator]) -> Operator:
    return shared[1]


@pytest.fixture
def gateway(shared: tuple[Served, Operator]) -> Served:
    """Return the shared gateway with the initial configuration and an empty log."""
    running, writer = shared
    writer.write()
    with running.client() as client:
        assert 200 == client.post("/admin/reload").status_code
    running.log.clear()
    return running


def test_sighup_applies_the_file_and_logs_the_differences(gateway: Served, operator: Operator) -> None:
    assert [200, 404] == [status(gateway), status(gateway, "n")]
    operator.write(1, models=("m", "n"))
    gateway.process.send_signal(signal.SIGHUP)

    assert wait_until(lambda: status(gateway, "n") == 200)
    assert wait_until(lambda: is_logged(gateway, "upstreams.one.replicas changed"))
    assert is_logged(gateway, "models.n added")
    assert wait_until(lambda: is_logged(gateway, "upstream x0: the replaced or removed upstream is closed"))
    assert not is_logged(gateway, SECRET)


def test_invalid_file_changes_nothing_and_reports_why(gateway: Served, operator: Operator) -> None:
    operator.write_broken()
    gateway.process.send_signal(signal.SIGHUP)
    assert wait_until(lambda: is_logged(gateway, "nothing has changed"))
    with gateway.client() as client:
        refused = client.post("/admin/reload")

    assert 422 == refused.status_code
    assert all(path in refused.json()["error"] for path in ("models.m.upstream", "no_such_key"))
    assert 200 == status(gateway)
    assert SECRET not in refused.text


def test_admin_reload_answers_once_new_requests_use_the_config(gateway: Served, operator: Operator) -> None:
    operator.write(0, models=("n",))
    with gateway.client() as client:
        outcome = client.post("/admin/reload").json()
        again = client.post("/admin/reload").json()

    assert {("models.m", "removed"), ("models.n", "added")} == {
        (change["path"], change["how"]) for change in outcome["changes"]
    }
    assert {"changes": [], "needs_restart": []} == again
    assert [404, 200] == [status(gateway), status(gateway, "n")]


def test_restarted_worker_serves_the_current_config(gateway: Served, operator: Operator) -> None:
    operator.write(0, models=("n",))
    with gateway.client() as client:
        client.post("/admin/reload")
    os.kill(gateway.child("gateway.processes.worker"), signal.SIGKILL)

    def serves() -> bool:
        try:
            return status(gateway, "n") == 200
        except httpx.TransportError:
            return False

    assert wait_until(serves)
    assert 404 == status(gateway)


def test_applies_a_changed_file_if_watched(urls: list[str], tmp_path: Path) -> None:
    operator = Operator(tmp_path / "router.yaml", urls, "memory", 1)
    operator.write(0, watch=True)
    gateway = Served(operator.path).wait_until_up()
    try:
        operator.write(0, models=("m", "n"), watch=True)
        assert wait_until(lambda: status(gateway, "n") == 200)
        operator.write_broken()
        assert wait_until(lambda: is_logged(gateway, "nothing has changed"))
        assert 200 == status(gateway)
    finally:
        gateway.stop()


def test_thirty_reloads_under_load_lose_no_request(urls: list[str], tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    operator = Operator(tmp_path / "router.yaml", urls, redis.url, 2)
    operator.write()
    gateway = Served(operator.path).wait_until_up()
    callers = Callers(gateway, 8)
    reload_statuses = []
    try:
        with gateway.client() as client:
            for number in itertools.chain(range(1, 31)):
                operator.write_broken() if number % 5 == 0 else operator.write(number)
                reload_statuses.append(client.post("/admin/reload").status_code)
                before = len(callers.statuses)
                assert wait_until(lambda before=before: len(callers.statuses) > before + 8)
    finally:
        callers.stop()
        gateway.stop()
        redis.stop()

    assert [422 if number % 5 == 0 else 200 for number in range(1, 31)] == reload_statuses
    assert {200} == set(callers.statuses)
    assert not any(KEY in line or SECRET in line for line in gateway.log)


ENGINES = """
listen: 127.0.0.1:0
upstreams:
  first: {{backend: torch, model: sentence-transformers/all-MiniLM-L6-v2, dtype: float32{more}}}
{others}
models: {{m: {{upstream: first}}, {models}}}
"""
SECOND = """  second:
    {backend: torch, model: sentence-transformers/all-MiniLM-L6-v2, dtype: bfloat16, process: %s}"""


def engines(gateway: Served) -> set[int]:
    return {pid for pid, line in gateway.children().items() if "backends.torch.serving.server" in line}


def put(path: Path, more: str = "", others: str = "", models: str = "") -> None:
    path.write_text(ENGINES.format(more=more, others=others, models=models))


def has_metric(gateway: Served, line: str) -> bool:
    with gateway.client() as client:
        return line in client.get("/metrics").text


def metric_lines(gateway: Served, name: str) -> list[str]:
    with gateway.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return [line for line in lines if line.startswith(f"{name}{{")]


def residence(gateway: Served, model: str) -> str | None:
    with gateway.client() as client:
        found = client.get(f"/v1/models/{model}").json()["residence"]
    assert found is None or isinstance(found, str)
    return found


@pytest.fixture(scope="module")
def engine_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "router.yaml"
    put(path)
    return path


@pytest.fixture(scope="module")
def engine_gateway(engine_config: Path) -> Iterator[Served]:
    """Serve an engine to tests that run in order; each begins with `first` only."""
    gateway = Served(engine_config).wait_until_up()
    yield gateway
    gateway.stop()


@pytest.fixture
def called(engine_gateway: Served) -> Iterator[Served]:
    """Keep the engine under constant load, and check that no request was lost."""
    callers = Callers(engine_gateway, 1)
    try:
        yield engine_gateway
    finally:
        callers.stop()
    assert {200} == set(callers.statuses)


def reloaded(gateway: Served) -> httpx.Response:
    with gateway.client() as client:
        # Some of these replies wait for a model to load.
        return client.post("/admin/reload", timeout=PATIENCE_S)


def test_reload_keeps_unchanged_engine_while_another_starts_and_stops(
    called: Served, engine_config: Path
) -> None:
    first = engines(called)
    # Neither a lane setting nor a model in its own process restarts the engine.
    put(engine_config, ", queue_tokens: 9000", SECOND % "apart", "n: {upstream: second}")
    assert 200 == reloaded(called).status_code
    assert (2, True) == (len(engines(called)), first < engines(called))
    assert 200 == status(called, "n")
    # The new model's residence and its engine's counters are reported.
    assert wait_until(lambda: residence(called, "n") == "loaded")
    assert has_metric(called, 'gateway_model_loaded{upstream="second"} 1.0')
    assert has_metric(called, 'te_queue_size{upstream="second"}')

    put(engine_config)
    assert 200 == reloaded(called).status_code
    assert wait_until(lambda: engines(called) == first)
    assert not has_metric(called, 'gateway_model_loaded{upstream="second"}')
    assert not has_metric(called, 'te_queue_size{upstream="second"}')


def test_changed_engine_takes_over_once_all_its_models_are_loaded(
    called: Served, engine_config: Path
) -> None:
    first = engines(called)
    put(engine_config, "", SECOND % "engine", "n: {upstream: second}")
    assert 200 == reloaded(called).status_code
    assert [200, 200] == [status(called), status(called, "n")]
    assert wait_until(lambda: len(engines(called)) == 1)
    second = engines(called)
    assert first != second
    # A model that cannot be loaded changes nothing.
    put(engine_config, ", task: rerank")
    refused = reloaded(called)
    assert (422, second) == (refused.status_code, engines(called))
    assert "upstreams.first" in refused.json()["error"]
    assert 200 == status(called, "n")


def test_each_listed_device_has_an_engine_that_serves_without_the_other(
    called: Served, engine_config: Path
) -> None:
    put(engine_config, ", device: [cpu, cpu]")
    assert 200 == reloaded(called).status_code
    assert wait_until(lambda: len(engines(called)) == 2)
    for replica in ("engine cpu", "engine cpu 2"):
        served = f'gateway_attempts_total{{outcome="ok",replica="{replica}",upstream="first"}}'
        assert wait_until(lambda served=served: has_metric(called, served)), replica

    first = min(engines(called))
    os.kill(first, signal.SIGKILL)
    # The calls of `called` go on; none of them may fail.
    assert wait_until(lambda: len(engines(called) - {first}) == 2)
    # One series counts both.
    (line,) = metric_lines(called, "te_queue_size")
    assert line.startswith('te_queue_size{upstream="first"}')
