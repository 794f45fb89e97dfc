"""Pictures and sound from a request to the engine and back, and the example that searches pictures."""

import base64
import contextlib
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from examples import search_pictures
from tests.conftest import Running, running_gateway
from tests.engine.dual_checkpoints import make_dual
from tests.engine.engines import EngineInProcess, load_tiny
from tests.engine.sounds import recordings
from tests.pictures import encoded, noise, pictures

CONFIG = """
upstreams: {clip: {backend: torch, model: clip, dtype: float32}}
models: {clip: {upstream: clip}}
"""
DATA = [encoded(noise(40 + seed, 30, seed), kind) for seed, kind in enumerate(("PNG", "JPEG", "WEBP"))]
URIS = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in DATA]


@pytest.fixture(scope="module")
def engine(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineInProcess:
    """Return the engine of a small CLIP."""
    folder = tmp_path_factory.mktemp("served") / "clip"
    make_dual("clip", minilm, folder)
    return EngineInProcess(load_tiny(folder))


@pytest.fixture
async def gateway(engine: EngineInProcess) -> AsyncIterator[Running]:
    """Boot a gateway before that engine."""
    async with running_gateway({}, CONFIG, engines={"clip": engine}) as running:
        yield running


async def vectors(gateway: Running, path: str, body: dict[str, Any]) -> Any:
    """Return the vectors of a reply."""
    reply = await gateway.post(path, {"model": "clip"} | body)
    assert 200 == reply.status_code, reply.text
    found = reply.json()
    rows = [item["embedding"] for item in found["data"]] if "data" in found else found["embeddings"]["float"]
    return np.array(rows)


async def test_every_dialect_gets_the_same_vectors(gateway: Running) -> None:
    expected = await vectors(gateway, "/v1/embeddings", {"input": [{"image": uri} for uri in URIS]})
    bodies: dict[str, dict[str, Any]] = {
        "/v2/embed": {"images": URIS, "input_type": "image", "embedding_types": ["float"]},
        "/v1/multimodalembeddings": {
            "inputs": [{"content": [{"type": "image_base64", "image_base64": uri}]} for uri in URIS]
        },
        "/infinity/embeddings": {"input": URIS, "modality": "image"},
    }
    for path, body in bodies.items():
        np.testing.assert_allclose(expected, await vectors(gateway, path, body), atol=1e-6, err_msg=path)
    for row, uri in zip(expected, URIS, strict=True):
        content = [{"type": "image_url", "image_url": {"url": uri}}]
        alone = await vectors(gateway, "/v1/embeddings", {"messages": [{"role": "user", "content": content}]})
        np.testing.assert_allclose(row, alone[0], atol=1e-6)
    assert np.linalg.norm(expected[0] - expected[1]) > 1e-3


async def test_texts_and_pictures_are_in_one_space_and_in_order(gateway: Running) -> None:
    mixed = await vectors(
        gateway, "/v1/embeddings", {"input": ["a dog", {"image": URIS[0]}, {"text": "a cat"}]}
    )
    texts = await vectors(gateway, "/v1/embeddings", {"input": ["a dog", "a cat"]})
    (picture,) = await vectors(gateway, "/v1/embeddings", {"input": {"image": URIS[0]}})

    np.testing.assert_allclose([texts[0], picture, texts[1]], mixed, atol=1e-5)
    np.testing.assert_allclose(1, np.linalg.norm(mixed, axis=1), atol=1e-5)


async def test_a_damaged_picture_is_named_and_others_are_served(gateway: Running) -> None:
    cut = base64.b64encode(DATA[0][:-60]).decode()
    reply = await gateway.post("/v1/embeddings", {"input": [{"image": URIS[1]}, {"image": cut}]})

    assert 400 == reply.status_code, reply.text
    assert "input 1" in reply.json()["error"]["message"]
    assert "damaged" in reply.json()["error"]["message"]
    await vectors(gateway, "/v1/embeddings", {"input": [{"image": URIS[1]}]})


async def test_every_kind_of_picture_is_served(gateway: Running) -> None:
    kinds = pictures()
    inputs = [{"image": base64.b64encode(data).decode()} for data in kinds.values()]
    found = [
        row
        for i in range(0, len(inputs), 16)
        for row in await vectors(gateway, "/v1/embeddings", {"input": inputs[i : i + 16]})
    ]

    assert len(kinds) == len(found) >= 50
    assert np.isfinite(found).all()


@pytest.fixture(scope="module")
def sound_engine(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineInProcess:
    """Return the engine of a small CLAP."""
    folder = tmp_path_factory.mktemp("served") / "clap"
    make_dual("clap", minilm, folder)
    return EngineInProcess(load_tiny(folder))


async def test_every_dialect_of_sound_gets_the_same_vectors(sound_engine: EngineInProcess) -> None:
    kinds = list(recordings().values())[::6]
    encodings = [base64.b64encode(data).decode() for data in kinds]
    uris = [f"data:audio/any;base64,{text}" for text in encodings]
    config = CONFIG.replace("model: clip", "model: clap")
    async with running_gateway({}, config, engines={"clip": sound_engine}) as gateway:
        expected = await vectors(gateway, "/v1/embeddings", {"input": [{"audio": uri} for uri in uris]})
        infinity = await vectors(gateway, "/infinity/embeddings", {"input": uris, "modality": "audio"})
        older = await vectors(gateway, "/infinity/embeddings_audio", {"input": encodings})
        mixed = await vectors(gateway, "/v1/embeddings", {"input": ["rain", {"audio": uris[0]}]})
        text = await vectors(gateway, "/v1/embeddings", {"input": "rain"})
        parts: list[dict[str, Any]] = [
            {"type": "audio_url", "audio_url": {"url": uris[0]}},
            {"type": "input_audio", "input_audio": {"data": encodings[0], "format": "wav"}},
        ]
        for part in parts:
            body = {"messages": [{"role": "user", "content": [part]}]}
            np.testing.assert_allclose(
                expected[:1], await vectors(gateway, "/v1/embeddings", body), atol=1e-6
            )
        picture = await gateway.post("/v1/embeddings", {"input": [{"image": URIS[0]}]})

    np.testing.assert_allclose(expected, infinity, atol=1e-6)
    np.testing.assert_allclose(expected, older, atol=1e-6)
    np.testing.assert_allclose([text[0], expected[0]], mixed, atol=1e-5)
    assert np.linalg.norm(expected[0] - expected[1]) > 1e-3
    assert 400 == picture.status_code
    assert "no model here can embed images" in picture.text


async def test_fields_of_a_chat_template_are_refused(gateway: Running) -> None:
    content = [{"type": "image_url", "image_url": {"url": URIS[0]}}]
    body = {"model": "clip", "messages": [{"role": "user", "content": content}]}
    reply = await gateway.post("/v1/embeddings", body | {"chat_template_kwargs": {"instruction": "find"}})

    assert 400 == reply.status_code, reply.text
    assert "applies no chat template" in reply.json()["error"]["message"]


async def test_a_model_of_images_refuses_sound(gateway: Running) -> None:
    sound = base64.b64encode(next(iter(recordings().values()))).decode()
    reply = await gateway.post("/v1/embeddings", {"model": "clip", "input": [{"audio": sound}]})

    assert 400 == reply.status_code
    assert "does not embed sound" in reply.json()["error"]["message"]


async def test_the_model_is_listed_as_one_of_images(gateway: Running) -> None:
    models = (await gateway.client.get("/v1/models")).json()["data"]

    assert {"embed", "embed_image"} <= set(models[0]["operations"])


async def test_the_example_prints_the_best_pictures_first(
    gateway: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "below").mkdir()
    for name, data in zip(("a.png", "b.jpg", "below/c.webp"), DATA, strict=True):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "notes.txt").write_text("no picture")
    monkeypatch.setattr(search_pictures, "KEY", "a key")
    assert ["a.png", "b.jpg", "below/c.webp"] == [
        str(path.relative_to(tmp_path)) for path in search_pictures.pictures_in(tmp_path)
    ]
    monkeypatch.setattr(search_pictures, "REQUEST_BYTES", len(DATA[0]) + len(DATA[1]))
    groups = search_pictures.batches(search_pictures.pictures_in(tmp_path))
    inputs: list[Any] = [[search_pictures.image(path) for path in paths] for paths in groups]
    inputs.append([{"text": "a dog"}])
    sent = [{"input": group, "encoding_format": "base64", "model": "clip"} for group in inputs]
    replies = iter([await gateway.post("/v1/embeddings", body) for body in sent])
    asked: list[dict[str, Any]] = []

    def post(url: str, **options: Any) -> httpx.Response:
        asked.append(options["json"])
        return next(replies)

    monkeypatch.setattr(httpx, "post", post)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        search_pictures.main([str(tmp_path), "a dog"])

    assert sent == asked
    scores = [float(line.split()[0]) for line in printed.getvalue().splitlines()]
    assert 3 == len(scores)
    assert sorted(scores, reverse=True) == scores


async def test_the_example_leaves_out_damaged_pictures(
    gateway: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, data in (("a.png", DATA[0]), ("b.png", DATA[0][:-200])):
        (tmp_path / name).write_bytes(data)
    found = {
        count: await gateway.post(
            "/v1/embeddings", {"input": inputs, "encoding_format": "base64", "model": "clip"}
        )
        for count, inputs in enumerate(
            (
                [search_pictures.image(tmp_path / name) for name in ("a.png", "b.png")],
                [search_pictures.image(tmp_path / "a.png")],
                [search_pictures.image(tmp_path / "b.png")],
                [{"text": "a dog"}],
            )
        )
    }
    replies = iter(found.values())
    monkeypatch.setattr(search_pictures, "KEY", "a key")
    monkeypatch.setattr(httpx, "post", lambda *_, **__: next(replies))
    search_pictures.main([str(tmp_path), "a dog"])

    printed = capsys.readouterr()
    assert "a.png" in printed.out
    assert "b.png" not in printed.out
    assert "left out" in printed.err
    assert "b.png: " in printed.err
