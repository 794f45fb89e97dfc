"""Endpoints for added models and upstreams: access, checks before the parent is asked, and replies."""

from typing import Any

import httpx
import msgspec
import pytest

from gateway.api.operators.additions import SETTINGS_BYTES_MAX, AdditionsClient
from gateway.audit.records import GATEWAY
from gateway.config.diff import ConfigChange, ReloadOutcome
from gateway.config.problems import Problem
from gateway.declared.additions import AdditionInfo, Edit, Listing, Put, Remove
from tests.api.test_worker_reload import ONE, TENANTS
from tests.conftest import Boots
from tests.fakes.tei import FakeTei

TEI = {"backend": "tei", "replicas": ["http://b"]}
PATHS = ["/admin/upstreams", "/admin/models", "/admin/upstreams/x", "/admin/models/org/x"]
LISTING = Listing(
    (AdditionInfo("x", TEI, None),), (AdditionInfo("org/x", {"upstream": "x"}, "models.org/x: why not"),)
)


class FakeParent:
    """Parent that replies with one outcome. Without an outcome it times out.

    edits: that it was sent, without their actors. actors: of these.
    """

    def __init__(self, outcome: ReloadOutcome | None = None) -> None:
        self.edits: list[Edit] = []
        self.actors: list[str] = []
        self._outcome = outcome
        self.adding = AdditionsClient(self._change, self._listing)

    async def _change(self, edit: Edit) -> ReloadOutcome:
        self.edits.append(msgspec.structs.replace(edit, by=GATEWAY))
        self.actors.append(edit.by.name)
        if self._outcome is None:
            raise TimeoutError
        return self._outcome

    async def _listing(self) -> Listing:
        if self._outcome is None:
            raise TimeoutError
        return LISTING


async def send(
    boot: Boots, parent: FakeParent | None, method: str, path: str, body: Any = None
) -> httpx.Response:
    adding = None if parent is None else parent.adding
    async with boot({"old": FakeTei()}, ONE, adding=adding) as gateway:
        return await gateway.client.request(method, path, json=body)


async def test_edits_accept_names_with_slashes_and_reply_like_a_reload(boot: Boots) -> None:
    parent = FakeParent(ReloadOutcome((ConfigChange("models.org/x", "added"),)))
    put = await send(boot, parent, "PUT", "/admin/models/org/x", {"upstream": "x"})
    removed = await send(boot, parent, "DELETE", "/admin/upstreams/x%2Fy")

    assert [200, 200] == [put.status_code, removed.status_code]
    assert {
        "changes": [{"path": "models.org/x", "how": "added", "detail": ""}],
        "needs_restart": [],
    } == put.json()
    assert [Put("models", "org/x", {"upstream": "x"}), Remove("upstreams", "x/y")] == parent.edits


async def test_lists_additions_with_their_problems(boot: Boots) -> None:
    parent = FakeParent(ReloadOutcome())
    replies = [await send(boot, parent, "GET", path) for path in PATHS]
    missing = await send(boot, parent, "GET", "/admin/models/x")

    model = {"name": "org/x", "settings": {"upstream": "x"}, "problem": "models.org/x: why not"}
    upstream = {"name": "x", "settings": TEI, "problem": None}
    assert [[upstream], [model], upstream, model] == [reply.json() for reply in replies]
    assert 404 == missing.status_code


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/admin/upstreams/x", [], 422, "upstreams.x: expected a mapping"),
        ("/admin/upstreams/x", "text", 422, "upstreams.x: expected a mapping"),
        ("/admin/upstreams/x", {**TEI, "nope": 1, "policy": 5}, 422, "upstreams.x.policy"),
        ("/admin/upstreams/x", {**TEI, "nope": 1, "policy": 5}, 422, "upstreams.x.nope"),
        ("/admin/models/x", {}, 422, "models.x.upstream: is missing"),
        ("/admin/models/x", {"upstream": "x" * SETTINGS_BYTES_MAX}, 422, "bytes"),
        ("/admin/models/" + "x" * SETTINGS_BYTES_MAX, {"upstream": "x"}, 422, "bytes"),
    ],
)
async def test_rejects_invalid_settings_without_asking_the_parent(
    boot: Boots, path: str, body: Any, status: int, message: str
) -> None:
    parent = FakeParent(ReloadOutcome())
    async with boot({"old": FakeTei()}, ONE, adding=parent.adding) as gateway:
        reply = await gateway.client.put(path, json=body)

    assert (status, True, []) == (reply.status_code, message in reply.json()["error"], parent.edits)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b'{"a": "\xff"}'])
async def test_rejects_malformed_json_with_400(boot: Boots, content: bytes) -> None:
    parent = FakeParent(ReloadOutcome())
    async with boot({"old": FakeTei()}, ONE, adding=parent.adding) as gateway:
        reply = await gateway.client.put("/admin/upstreams/x", content=content)

    assert (400, []) == (reply.status_code, parent.edits)


async def test_reads_the_body_as_json_whatever_its_content_type(boot: Boots) -> None:
    parent = FakeParent(ReloadOutcome())
    async with boot({"old": FakeTei()}, ONE, adding=parent.adding) as gateway:
        # The content type that curl sends by default.
        form = {"content-type": "application/x-www-form-urlencoded"}
        reply = await gateway.client.put("/admin/models/x", content=b'{"upstream": "x"}', headers=form)

    assert (200, [Put("models", "x", {"upstream": "x"})]) == (reply.status_code, parent.edits)


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (ReloadOutcome(problems=(Problem("models.x.upstream", "no"),)), 422),
        (ReloadOutcome(problems=(Problem("models.x", "no"),), kind="unknown"), 404),
        (ReloadOutcome(problems=(Problem("quotas.store", "no"),), kind="unavailable"), 503),
        (None, 504),
    ],
)
async def test_reports_why_nothing_has_changed(
    boot: Boots, outcome: ReloadOutcome | None, status: int
) -> None:
    reply = await send(boot, FakeParent(outcome), "DELETE", "/admin/models/x")

    # In TEI's dialect a timeout has status 424.
    assert reply.status_code == (424 if status == 504 else status)
    assert reply.json()["error"]


async def test_reports_a_parent_that_does_not_respond(boot: Boots) -> None:
    assert 424 == (await send(boot, FakeParent(), "GET", "/admin/models")).status_code


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_requires_an_operator_key_and_a_store_for_additions(
    boot: Boots, method: str, path: str
) -> None:
    if method != "GET" and path in PATHS[:2]:
        path += "/y"
    body = {"upstream": "x"} if "models" in path else TEI
    parent = FakeParent(ReloadOutcome())
    async with boot({"old": FakeTei()}, ONE + TENANTS, adding=parent.adding) as gateway:
        # The host is not local, therefore a key is required, and this one is for models.
        rejected = await gateway.client.request(method, path, json=body)
    without_store = await send(boot, None, method, path, body)

    assert (403, 404, []) == (rejected.status_code, without_store.status_code, parent.edits)
