"""The recorded calls of a real TEI, sent to the gateway in front of the fake that replays it."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Boots
from tests.fakes.checkpoint import write_small_files
from tests.recorded_tei import (
    KEPT,
    RECORDED,
    assert_answered,
    body_for_fake,
    fake_of,
    is_kept,
    kept_status,
    length,
    name_of,
    shape,
)

CONFIG = """
upstreams: {{only: {{backend: tei, replicas: ["http://tei"], tokenizer: {folder}, token_encoding: model}}}}
models: {{minilm: {{upstream: only}}}}
defaults: {{any_name: true}}
"""
# The fake's vocabulary has other ids than the recorded model's, and TEI refuses an empty text.
OWN_IDS = {7592: 0, 101: 1, 102: 2}


def ids_for_fake(body: bytes) -> bytes:
    """Return a body with the recorded model's ids replaced by those of the fake's vocabulary."""
    body = body.replace(b"[101, 102]", b"[101, 7592]")
    return re.sub(rb"\b(7592|101|102)\b", lambda match: str(OWN_IDS[int(match[0])]).encode(), body)


@pytest.mark.parametrize("recorded", RECORDED, ids=name_of)
async def test_gateway_in_front_of_tei_answers_as_tei_does(
    boot: Boots, tmp_path: Path, recorded: dict[str, Any]
) -> None:
    config = CONFIG.format(folder=write_small_files(tmp_path, max_tokens=512))
    body = body_for_fake(recorded)
    has_ids = is_kept(recorded, "`x-compute-characters` of token ids")
    async with boot({"tei": fake_of(recorded["model"])}, config) as gateway:
        reply = await gateway.client.request(
            recorded["method"], recorded["path"], content=ids_for_fake(body) if has_ids else body
        )

    # TEI itself decodes the ids.
    status = recorded["status"] if recorded["path"] == "/decode" else kept_status(recorded)
    assert_answered(recorded, reply, status, counts=not has_ids)
    if recorded["status"] == reply.status_code == 200 and reply.content and recorded["path"] != "/info":
        expected, found = recorded["reply"], reply.json()
        if is_kept(recorded, "`/v1/embeddings`"):
            assert (True, 0) == (bool(found.pop("id")), found["usage"].pop("completion_tokens"))
        assert shape(expected) == shape(found)
        assert length(expected) == length(found) or recorded["path"] in ("/predict", "/embed_sparse")


def test_every_kept_difference_applies_to_a_recorded_call() -> None:
    assert [] == [kept.title for kept in KEPT if not any(map(kept.applies, RECORDED))]


# Differences that no recorded call shows; test_tei_fields.py has most of them.
NOT_RECORDED = {
    "`/info`: `max_batch_requests`, `sha`, `docker_label`",
    "`/info`: `tokenization_workers`",
    "a body with `content-type: text/plain`",
    "`/vertex` with an empty `instances`",
    "`/similarity` with a sparse model",
}


def test_the_kept_differences_are_those_of_the_documents() -> None:
    text = Path("docs/dialects-servers.md").read_text(encoding="utf-8")
    section = text.partition("### Differences from TEI\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|")[0].strip() for line in section.splitlines() if line.startswith("| ")]

    assert [kept.title for kept in KEPT] == [row for row in rows[1:] if row not in NOT_RECORDED]
    assert set(rows) >= NOT_RECORDED
