"""/admin/status and /ui: content, access and headers."""

import asyncio
import pwd
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import httpx
import msgspec
import pytest

from gateway.api.operators import ui
from gateway.config.host_users import people
from gateway.telemetry.snapshot import Snapshot, TenantTotals
from gateway.tenants.keyring import key_digest
from tests.conftest import CONFIG, KEY, Boots, Running
from tests.fakes.hooks import Gate, tei_with_hook, until
from tests.fakes.hooks import embedder_and_reranker as fakes
from tests.fakes.tei import FakeTei
from tests.waiting import PATIENCE_S

OPENAI = "/v1/embeddings"
CONSOLE = Path(ui.__file__).parent / "console" / "src"
HERE = {"host": "127.0.0.1:8080", "authorization": ""}
FILES = {
    "/ui": "text/html; charset=utf-8",
    "/ui/page.js": "text/javascript; charset=utf-8",
    "/ui/page.css": "text/css; charset=utf-8",
    "/ui/icon.svg": "image/svg+xml",
}


async def get_status(gateway: Running) -> Snapshot:
    reply = await gateway.client.get("/admin/status", headers=HERE)
    assert 200 == reply.status_code, reply.text
    return msgspec.json.decode(reply.content, type=Snapshot)


async def wait_for_status(gateway: Running, holds: Callable[[Snapshot], bool]) -> Snapshot:
    """Return the first snapshot that meets a condition. Attempts are counted one turn of the loop later."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds(snapshot := await get_status(gateway)):  # noqa: ASYNC110 - the gateway has no such event
            await asyncio.sleep(0)
    return snapshot


async def test_snapshot_has_calls_tenants_models_and_replicas(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        await gateway.post(OPENAI, {"input": ["one two", "three"]})
        await gateway.post(OPENAI, {"input": "a", "model": "nowhere"})
        snapshot = await wait_for_status(
            gateway, lambda status: sum(replica.attempts for replica in status.replicas) == 1
        )

    assert {"ok": 1, "model_not_found": 1} == snapshot.calls.outcomes
    assert 2 == snapshot.calls.durations.counts[-1]
    (tenant,) = snapshot.tenants
    assert ("default", 1, 2, 7, 0) == (
        tenant.name,
        tenant.calls,
        tenant.inputs,
        tenant.tokens,
        tenant.refused,
    )
    models = {model.name: model for model in snapshot.models}
    assert ["bge", "org/bge", "strict", "no-rerank", "cross"] == list(models)
    assert ("embedder", "tei", "ready") == (
        models["bge"].upstream,
        models["bge"].backend,
        models["bge"].state,
    )
    assert "embed" in models["bge"].operations
    assert models["bge"].fingerprint
    # TEI does not report the width: its reference texts have shown it.
    assert (8, None) == (models["bge"].dimensions, models["cross"].dimensions)
    replicas = {replica.name: replica for replica in snapshot.replicas}
    good, dead = replicas["http://tei-0"], replicas["http://tei-1"]
    assert ("up", 1, 0) == (good.state, good.attempts, good.failed)
    assert good.latency_s is not None
    assert ("down", None) == (dead.state, dead.latency_s)
    assert "connection" in dead.reason
    assert dead.since_s is not None
    assert {"embedder http://tei-0", "embedder http://tei-1", "reranker http://rerank-0"} >= {
        change.subject for change in snapshot.changes
    }
    assert ("memory", False) == (snapshot.store.kind, snapshot.store.away)


async def test_tenants_can_be_left_out_of_the_snapshot(boot: Boots) -> None:
    other = "sk-other"
    tenants = (
        f'{{acme: {{keys: ["{key_digest(KEY)}"]}}, '
        f'globex: {{keys: ["{key_digest(other)}"], limits: {{requests_per_day: 1}}}}}}'
    )
    async with boot(fakes(), f"{CONFIG}\ntenants: {tenants}\n") as gateway:
        await gateway.post(OPENAI, {"input": ["one two", "three"]})
        for _ in range(2):
            await gateway.post(OPENAI, {"input": "four"}, authorization=f"Bearer {other}")
        whole = await get_status(gateway)
        reply = await gateway.client.get("/admin/status?tenants=false", headers=HERE)
        wrong = await gateway.client.get("/admin/status?tenants=few", headers=HERE)
    short = msgspec.json.decode(reply.content, type=Snapshot)

    assert ["acme", "globex"] == [tenant.name for tenant in whole.tenants]
    assert () == short.tenants
    tokens = sum(tenant.tokens for tenant in whole.tenants)
    assert tokens > 0
    # globex has one call that was served, and one that its limit refused, whose input counts too.
    assert TenantTotals(tenants=2, calls=3, inputs=4, tokens=tokens, refused=1) == short.tenant_totals
    assert short.tenant_totals == whole.tenant_totals
    assert 422 == wrong.status_code
    assert "tenants" in wrong.text


async def test_snapshot_has_queued_and_in_flight_inputs(boot: Boots) -> None:
    gate = Gate()
    config = CONFIG.replace("embedder: {", "embedder: {in_flight_batches: 1, ")
    async with boot({"tei-0": tei_with_hook(gate)}, config) as gateway:
        calls = [asyncio.create_task(gateway.post(OPENAI, {"input": "abc"}))]
        await until(lambda: gate.waiting == 1)
        calls.append(asyncio.create_task(gateway.post(OPENAI, {"input": "def"})))
        snapshot = await wait_for_status(gateway, lambda status: status.lanes[0].queued_inputs > 0)
        gate.opened.set()
        await asyncio.gather(*calls)

    lane = snapshot.lanes[0]
    assert ("embedder", 1, 7, 1) == (
        lane.upstream,
        lane.queued_inputs,
        lane.queued_tokens,
        lane.in_flight_batches,
    )
    # Requests for the status are not counted.
    assert 2 == snapshot.calls_in_flight


async def test_counts_quota_denials_by_tenant(boot: Boots) -> None:
    limits = "limits: {requests_per_day: 1}"
    config = f'{CONFIG}\ntenants: {{acme: {{keys: ["{key_digest(KEY)}"], {limits}}}}}\n'
    async with boot({"tei-0": FakeTei()}, config) as gateway:
        statuses = [(await gateway.post(OPENAI, {"input": "a"})).status_code for _ in range(3)]
        snapshot = await get_status(gateway)

    assert [200, 429, 429] == statuses
    assert 2 == snapshot.tenants[0].refused
    assert 2 == snapshot.calls.outcomes["quota_exceeded"]


async def test_status_requires_an_operator_key(boot: Boots) -> None:
    config = f'tenants: {{ops: {{keys: [{{digest: "{key_digest(KEY)}", scopes: [admin]}}]}}}}\n'
    config += f"listen: 0.0.0.0:8080\n{CONFIG}"
    async with boot({"tei-0": FakeTei()}, config) as gateway:
        with_key = await gateway.client.get("/admin/status")
        without = await gateway.client.get("/admin/status", headers=HERE)
        wrong = await gateway.client.get("/admin/status", headers={"authorization": "Bearer wrong"})

    assert (200, 401, 401) == (with_key.status_code, without.status_code, wrong.status_code)


@pytest.mark.parametrize(("is_shared_host", "without"), [(False, 200), (True, 401)])
async def test_admin_is_open_where_one_person_can_log_in_and_never_for_a_wrong_key(
    boot: Boots, is_shared_host: bool, without: int
) -> None:
    config = f'tenants: {{acme: {{keys: ["{key_digest(KEY)}"]}}}}\nlisten: 127.0.0.1:8080\n{CONFIG}'
    async with boot({"tei-0": FakeTei()}, config, is_shared_host=is_shared_host) as gateway:

        async def status(key: str) -> int:
            headers = HERE | {"authorization": f"Bearer {key}" if key else ""}
            return (await gateway.client.get("/admin/status", headers=headers)).status_code

        found = [await status(key) for key in ("", "wrong", KEY)]

    # The last one is valid, and has no scope.
    assert [without, 401, 403 if is_shared_host else 200] == found


def test_people_are_accounts_that_can_log_in() -> None:
    def account(name: str, number: int, shell: str = "/bin/bash") -> pwd.struct_passwd:
        return pwd.struct_passwd((name, "x", number, number, "", f"/home/{name}", shell))

    accounts = [
        account("root", 0),
        account("postgres", 70),
        account("jo", 1000),
        account("ana", 1001, "/usr/bin/zsh"),
        account("deploy", 1002, "/usr/sbin/nologin"),
        account("nobody", 65534),
    ]
    assert ["ana", "jo"] == people(accounts)


async def test_rejects_a_key_without_the_admin_scope(boot: Boots) -> None:
    config = f'listen: 0.0.0.0:8080\ntenants: {{acme: {{keys: ["{key_digest(KEY)}"]}}}}\n{CONFIG}'
    async with boot({"tei-0": FakeTei()}, config) as gateway:
        reply = await gateway.client.get("/admin/status")

    assert 403 == reply.status_code
    assert "admin" in reply.json()["error"]


async def test_no_snapshot_contains_inputs_or_keys(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        await gateway.post(OPENAI, {"input": "a secret text"})
        await gateway.post(OPENAI, {"input": ["a secret text", ""]})
        reply = await gateway.client.get("/admin/status", headers=HERE)

    assert "secret" not in reply.text
    assert KEY not in reply.text


@pytest.mark.parametrize("path", sorted(FILES))
async def test_page_sends_strict_security_headers(boot: Boots, path: str) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.client.get(path, headers=HERE)

    policy = dict(
        directive.split(" ", 1) for directive in reply.headers["content-security-policy"].split("; ")
    )
    assert 200 == reply.status_code
    assert FILES[path] == reply.headers["content-type"]
    assert ("'none'", "'self'", "'self'", "'none'") == (
        policy["default-src"],
        policy["script-src"],
        policy["connect-src"],
        policy["frame-ancestors"],
    )
    assert "unsafe" not in reply.headers["content-security-policy"]
    assert "nosniff" == reply.headers["x-content-type-options"]
    assert "no-referrer" == reply.headers["referrer-policy"]
    assert "set-cookie" not in reply.headers


class References(HTMLParser):
    """Every address in a page, and every inline handler and style in its markup."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.inline: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the addresses and inline code of one tag."""
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href", "action"}]
        self.inline += [name for name, _ in attrs if name.startswith("on") or name == "style"]
        if tag == "script" and not dict(attrs).get("src"):
            self.inline.append(tag)


async def test_the_page_loads_nothing_from_other_hosts(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        page = await gateway.client.get("/ui", headers=HERE)
        references = References(page.text)
        own = [address for address in references.addresses if address.startswith("/")]
        replies = [await gateway.client.get(address) for address in own]

    assert "text/html; charset=utf-8" == page.headers["content-type"]
    assert references.addresses
    assert [] == [address for address in references.addresses if not address.startswith(("/", "#", "data:"))]
    assert [] == references.inline
    assert [200] * len(own) == [reply.status_code for reply in replies]


async def test_script_inserts_no_markup_and_stores_what_is_documented(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        script: httpx.Response = await gateway.client.get("/ui/page.js")

    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage|sessionStorage|"
        r"indexedDB|document\.cookie"
    )
    sources = {path.name: path.read_text() for path in CONSOLE.rglob("*.ts*")}
    assert "main.tsx" in sources
    found = {name: set(words) for name, text in sources.items() if (words := forbidden.findall(text))}
    # A key for as long as the tab, and what begins a sign-in; colors and a language of code in this browser.
    assert found == {
        "session.ts": {"sessionStorage"},
        "sign-on.ts": {"sessionStorage"},
        "theme.ts": {"localStorage"},
        "code.tsx": {"localStorage"},
    }
    # An issuer's token is never stored.
    assert ["SIGNED_ON, name", "PENDING, JSON.stringify(pending"] == re.findall(
        r"setItem\(([^)]*)\)", sources["sign-on.ts"]
    )
    # Packages: the policy stops markup from strings.
    own = re.sub(r"innerHTML|dangerouslySetInnerHTML", "", script.text)
    assert {"sessionStorage", "localStorage"} == set(forbidden.findall(own))
