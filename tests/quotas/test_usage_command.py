"""`gateway usage`: settled usage as a table, as JSON or as CSV, or one line about a failure."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.context import BLANK_NOTE
from gateway.events import Event
from gateway.quotas.end_users import EndUser
from gateway.quotas.ledger import QuotaRequest
from gateway.quotas.limits import SECOND_US, Cost
from gateway.quotas.redis_ledger import OutagePolicy, RedisLedger
from gateway.store.redis_client import RedisClient
from gateway.tenants.end_users import digest_of_user
from gateway.tenants.keyring import FIRST_KEY_NOTE
from tests.quotas.conftest import Commands
from tests.quotas.redis_server import RedisServer

CONFIG = """
quotas: {{store: "{store}"}}
upstreams: {{one: {{backend: tei, replicas: ["http://127.0.0.1:1"]}}}}
models: {{bge: {{upstream: one}}}}
"""
DAY = datetime(2026, 2, 28, 12, tzinfo=UTC)


@pytest.fixture
def file(own_redis: RedisServer, tmp_path: Path) -> Path:
    path = tmp_path / "router.yaml"
    path.write_text(CONFIG.format(store=own_redis.url))
    return path


def use(
    server: RedisServer,
    day: datetime,
    model: str,
    cost: Cost,
    tenant: str = "acme",
    user: str | None = None,
) -> None:
    """Reserve and settle one request of that day."""

    async def call() -> None:
        events: list[Event] = []
        now_us = round(day.timestamp()) * SECOND_US
        ledger = RedisLedger(
            RedisClient(server.url, 2), OutagePolicy(), "test", events.append, lambda: now_us
        )
        end_user = None if user is None else EndUser(user, 100)
        id_ = f"{day}{model}{user}"
        request = QuotaRequest(id_, tenant, (), cost, 60 * SECOND_US, model, end_user=end_user)
        ledger.settle(await ledger.reserve(request), cost)
        await ledger.flush()
        await ledger.aclose()

    asyncio.run(call())


ROWS: list[dict[str, Any]] = [
    {
        "tenant": "acme",
        "day": "2026-02-28",
        "model": "bge",
        "requests": 1,
        "tokens": 7,
        "inputs": 2,
        "images": 0,
        "cost": 0.0,
    },
    {
        "tenant": "acme",
        "day": "2026-02-28",
        "model": "org/a|b",
        "requests": 1,
        "tokens": 5,
        "inputs": 1,
        "images": 4,
        "cost": 0.00007,
    },
    {
        "tenant": "acme",
        "day": "2026-03-01",
        "model": "bge",
        "requests": 1,
        "tokens": 9,
        "inputs": 3,
        "images": 0,
        "cost": 0.0,
    },
]


@pytest.fixture
def used(own_redis: RedisServer) -> None:
    """Record three requests on two days, and one on a day outside of the queries."""
    use(own_redis, DAY, "bge", Cost(tokens=7, inputs=2))
    use(own_redis, DAY, "org/a|b", Cost(tokens=5, inputs=1, images=4, budget=70_000))
    use(own_redis, DAY + timedelta(days=1), "bge", Cost(tokens=9, inputs=3))
    use(own_redis, DAY + timedelta(days=2), "bge", Cost(tokens=100))


DAYS = ("--since", "2026-02-28", "--until", "2026-03-01")


def cells(row: dict[str, Any]) -> list[str]:
    """Return the values of a row as tables show them."""
    costs = {0.0: "0.00", 0.00007: "0.00007"}
    return [costs[value] if isinstance(value, float) else str(value) for value in row.values()]


def test_prints_usage_as_json(command: Commands, file: Path, used: None) -> None:
    ended = command("usage", "acme", *DAYS, "--form", "json", "-c", str(file))

    assert (0, "") == (ended.status, ended.err)
    assert ROWS == json.loads(ended.out)


def test_prints_usage_as_csv(command: Commands, file: Path, used: None) -> None:
    ended = command("usage", "acme", *DAYS, "--form", "csv", "-c", str(file))

    lines = [",".join([*cells(row), ""]) for row in ROWS]
    assert (0, "") == (ended.status, ended.err)
    assert [",".join([*ROWS[0], "currency"]), *lines] == ended.out.splitlines()


@pytest.mark.parametrize("form", ["json", "csv"])
def test_each_form_has_an_option_of_its_own(command: Commands, file: Path, used: None, form: str) -> None:
    short, older = (
        command("usage", "acme", *DAYS, *words, "-c", str(file))
        for words in ([f"--{form}"], ["--form", form])
    )

    assert 0 == short.status
    assert older == short


@pytest.mark.parametrize("words", [("usage", "acme"), ("keys", "list"), ("tenants", "list")])
def test_needs_only_the_store_of_the_gateways_environment(
    command: Commands, file: Path, words: tuple[str, ...]
) -> None:
    text = file.read_text().replace("tei, ", "tei, api_key: '${NOT_SET}', ")
    file.write_text(f"listen: ${{NOT_SET}}\ntracing: {{endpoint: '${{NOT_SET}}'}}\n{text}")
    ended = command(*words, "-c", str(file))

    assert (0, "") == (ended.status, ended.err.replace(BLANK_NOTE, "").strip())


def test_prints_usage_as_a_table(command: Commands, file: Path, used: None) -> None:
    ended = command("usage", "acme", *DAYS, "-c", str(file))

    lines = [line.split() for line in ended.out.splitlines()]
    assert (0, "") == (ended.status, ended.err)
    assert [list(ROWS[0]), *map(cells, ROWS)] == lines


def test_table_names_the_currency(command: Commands, file: Path, used: None) -> None:
    file.write_text(f"{file.read_text()}currency: EUR\n")
    ended = command("usage", "acme", *DAYS, "-c", str(file))

    assert "images  cost (EUR)" in ended.out


def test_prints_a_month_with_totals(command: Commands, file: Path, used: None) -> None:
    file.write_text(f"{file.read_text()}currency: EUR\n")
    sheet = command("usage", "acme", "--month", "2026-02", "--csv", "-c", str(file))
    report = json.loads(command("usage", "acme", "--month", "2026-02", "--json", "-c", str(file)).out)
    table = command("usage", "acme", "--month", "2026-02", "-c", str(file)).out

    assert (0, "") == (sheet.status, sheet.err)
    assert [
        "total,tenant,month,model,requests,tokens,inputs,images,cost,forecast_cost,currency",
        ",acme,2026-02,bge,1,7,2,0,0.00,,EUR",
        ",acme,2026-02,org/a|b,1,5,1,4,0.00007,,EUR",
        "tenant,acme,2026-02,,2,12,3,4,0.00007,,EUR",
        "all,,2026-02,,2,12,3,4,0.00007,,EUR",
    ] == sheet.out.splitlines()
    assert ("2026-02", "EUR", 12, 0.00007) == (
        report["month"],
        report["currency"],
        report["total"]["tokens"],
        report["total"]["cost"],
    )
    assert ["all", "2026-02", "2", "12", "3", "4", "0.00007"] == table.splitlines()[-1].split()


def test_forgets_an_end_user(command: Commands, file: Path, own_redis: RedisServer) -> None:
    today = datetime.now(UTC)
    for user, tokens in (("ann", 5), ("ann lee", 7), (digest_of_user("acme", "ann"), 9)):
        use(own_redis, today, "bge", Cost(tokens=tokens), user=user)

    def rows(by: str) -> list[tuple[str | None, int]]:
        found = json.loads(command("usage", "acme", "--by", by, "--json", "-c", str(file)).out)
        return [(row.get("end_user"), row["tokens"]) for row in found]

    before, total = rows("end_user"), rows("model")
    ended = command("usage", "forget", "--tenant", "acme", "--end-user", "ann", "-c", str(file))
    sheet = command(
        "usage", "acme", "--month", f"{today:%Y-%m}", "--by", "end_user", "--csv", "-c", str(file)
    )

    assert [("ann", 5), ("ann lee", 7), (digest_of_user("acme", "ann"), 9)] == before
    assert (0, "") == (ended.status, ended.err)
    assert "deleted the usage of 1 day" in ended.out
    assert [("ann lee", 7), ("other", 14)] == rows("end_user")
    assert [(None, 21)] == total == rows("model")
    assert (
        "total,tenant,month,model,requests,tokens,inputs,images,cost,end_user,forecast_cost,currency"
        in sheet.out
    )
    assert f",acme,{today:%Y-%m},bge,1,7,0,0,0.00,ann lee,," in sheet.out.splitlines()


@pytest.mark.parametrize(
    "words", [("--tenant", "acme"), ("--end-user", "ann"), ("--tenant", "acme", "--end-user", "")]
)
def test_forgetting_needs_tenant_and_end_user(command: Commands, file: Path, words: tuple[str, ...]) -> None:
    ended = command("usage", "forget", *words, "-c", str(file))

    assert (2, "") == (ended.status, ended.out)
    assert "gateway usage forget --tenant T --end-user U" in ended.err


def test_prints_usage_of_all_tenants_by_default(
    command: Commands, file: Path, own_redis: RedisServer, used: None
) -> None:
    in_file, set_, with_key = "in the file", "set", "with a key"
    file.write_text(f"{file.read_text()}tenants: {{{in_file}: {{}}}}\n")
    command("tenants", "set", set_, "-c", str(file))
    for tenant in (with_key, "acme"):
        command("keys", "create", tenant, "--new-tenant", "-c", str(file))
    for tenant in (in_file, set_, with_key, "default"):
        use(own_redis, DAY, "bge", Cost(tokens=7, inputs=2), tenant)
    ended = command("usage", *DAYS, "--form", "json", "-c", str(file))

    rows = json.loads(ended.out)
    assert (0, "") == (ended.status, ended.err)
    assert ROWS == [row for row in rows if row["tenant"] == "acme"]
    assert ["acme"] * 3 + ["default", in_file, set_, with_key] == [row["tenant"] for row in rows]


def test_prints_usage_of_today_by_default(command: Commands, file: Path, own_redis: RedisServer) -> None:
    use(own_redis, datetime.now(UTC), "bge", Cost(tokens=4, inputs=1))
    ended = command("usage", "acme", "--form", "json", "-c", str(file))

    assert [4] == [row["tokens"] for row in json.loads(ended.out)]


def test_prints_no_rows_for_an_unused_tenant(command: Commands, file: Path) -> None:
    assert "[]\n" == command("usage", "nobody", "--form", "json", "-c", str(file)).out


@pytest.mark.parametrize(
    ("days", "expected"),
    [
        (
            ("--since", "2026-03-02", "--until", "2026-03-01"),
            "since (2026-03-02) is after until (2026-03-01)",
        ),
        (("--since", "2020-01-01", "--until", "2026-01-01"), "from 1 to 400 days"),
        (("--since", "9999-12-31"), "since (9999-12-31) is after until ("),
        (("--since", "0001-01-01"), "from 1 to 400 days"),
    ],
)
def test_reports_invalid_day_ranges_in_one_line(
    command: Commands, file: Path, days: tuple[str, ...], expected: str
) -> None:
    ended = command("usage", "acme", *days, "-c", str(file))

    assert (1, "") == (ended.status, ended.out)
    assert 1 == len(ended.err.strip().splitlines())
    assert expected in ended.err


def test_rejects_malformed_days(command: Commands, file: Path) -> None:
    ended = command("usage", "acme", "--since", "yesterday", "-c", str(file))

    assert (2, "") == (ended.status, ended.out)
    assert "--since: 'yesterday' is no day such as 2027-01-31" in ended.err


def test_usage_command_reports_a_missing_store_in_one_line(
    command: Commands, file: Path, own_redis: RedisServer
) -> None:
    own_redis.kill()
    away = command("usage", "acme", "-c", str(file))
    file.write_text(CONFIG.format(store="memory"))
    memory = command("usage", "acme", "-c", str(file))

    assert [(1, ""), (1, "")] == [(result.status, result.out) for result in (away, memory)]
    assert "unavailable" in away.err
    assert "the gateway at http://127.0.0.1:8080" in memory.err
    assert [1, 1] == [len(result.err.strip().splitlines()) for result in (away, memory)]


NEEDS_MUCH = """
listen: ${LISTEN}
tracing: {endpoint: "${COLLECTOR}"}
quotas: {store: "%s"}
upstreams: {one: {backend: tei, replicas: ["${TEI}"], tls: {ca: /nowhere.pem}}}
models: {bge: {upstream: one, deadline_s: "${DEADLINE}", colour: blue}}
tenants: {acme: {keys: ["sha256:${DIGEST}"], limits: {tokens_per_day: 0}}}
"""
COMMANDS = (
    ("usage",),
    ("keys", "list"),
    ("keys", "create", "acme", "--new-tenant", "--id", "new"),
    ("keys", "revoke", "new"),
    ("tenants", "set", "globex", "--model", "bge"),
    ("tenants", "list"),
    ("tenants", "remove", "globex"),
)


def test_commands_on_redis_need_only_redis(own_redis: RedisServer, tmp_path: Path, command: Commands) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(NEEDS_MUCH % own_redis.url)
    for words in COMMANDS:
        ended = command(*words, "-c", str(path))
        assert (0, "") == (
            ended.status,
            ended.err.replace(FIRST_KEY_NOTE, "").replace(BLANK_NOTE, "").strip(),
        ), words


def test_commands_on_redis_need_no_file(
    own_redis: RedisServer, tmp_path: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_REDIS", own_redis.url)
    assert 0 == command("tenants", "set", "acme", "--store", "${MY_REDIS}").status
    for words in COMMANDS:
        ended = command(*words, "--store", "${MY_REDIS}")
        assert (0, "") == (ended.status, ended.err), words


@pytest.mark.parametrize(
    ("store", "reason"),
    [
        ("${NOWHERE_SET}", "the environment has no NOWHERE_SET"),
        ("redis:/x", "quotas.store: not one of: memory"),
    ],
)
def test_store_of_the_command_line_is_checked(store: str, reason: str, command: Commands) -> None:
    ended = command("usage", "--store", store)

    assert 1 == ended.status
    assert "--store has 1 problem" in ended.err
    assert reason in ended.err
