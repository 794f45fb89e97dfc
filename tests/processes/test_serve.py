"""The gateway as a new user starts it: real weights, real clients, the printed curl command."""

import base64
import json
import os
import pty
import re
import select
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from openai import NotFoundError, OpenAI

from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import KEY, Served
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


def test_printed_curl_command_works(served: Served) -> None:
    line = next(line for line in served.banner.splitlines() if "curl " in line).strip()
    command = shlex.split(line.replace("$GATEWAY_API_KEY", KEY))

    reply = json.loads(subprocess.run(["curl", "-s", *command[1:]], capture_output=True, check=True).stdout)

    assert len(reply["data"][0]["embedding"]) == 384


def test_banner_lists_models_and_hides_a_configured_key(
    served: Served,
) -> None:
    assert f"{served.url}/ui" in served.banner
    assert f'OpenAI(base_url="{served.url}/v1"' in served.banner
    assert "all-minilm-l6-v2" in served.banner
    assert "embed encode rerank tokenize detokenize" in served.banner
    assert KEY not in served.banner
    assert not any(KEY in line for line in served.log)


def test_openai_sdk_works(served: Served) -> None:
    client = OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0)
    texts = ["How do I parse JSON?", "Parse a JSON document.", "Listen on a socket."]

    reply = client.embeddings.create(model="small", input=texts)
    vectors = np.array([item.embedding for item in reply.data])

    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
    assert reply.usage.prompt_tokens > 0
    assert "all-minilm-l6-v2" in [model.id for model in client.models.list()]
    floats = client.embeddings.create(model="all-minilm-l6-v2", input=texts, encoding_format="float")
    np.testing.assert_allclose(vectors, [item.embedding for item in floats.data], atol=2e-3)
    with pytest.raises(NotFoundError, match="no model 'nope'"):
        client.embeddings.create(model="nope", input="a")


def test_programs_of_the_first_steps_run(served: Served, repository: Path) -> None:
    programs = re.findall(
        r"^```python\n(.*?)^```", (repository / "docs/start.md").read_text(), re.DOTALL | re.MULTILINE
    )
    variables: dict[str, Any] = {}
    for program in programs:
        exec(program.replace("http://127.0.0.1:8080", served.url).replace("<the key>", KEY), variables)

    assert 2 == len(variables["reply"].data)
    assert (2, 384) == variables["vectors"].shape


def test_hugging_face_inference_client_works(served: Served) -> None:
    embedder = InferenceClient(model=f"{served.url}/models/all-minilm-l6-v2/embed", token=KEY)
    comparer = InferenceClient(model=f"{served.url}/similarity", token=KEY)

    vectors = embedder.feature_extraction(["a cat", "a dog"])  # type: ignore[arg-type]
    scores = comparer.sentence_similarity("a cat", ["a kitten", "an invoice"])

    assert vectors.shape == (2, 384)
    assert scores[0] > scores[1]


def test_base64_and_floats_encode_the_same_vector(served: Served) -> None:
    with served.client() as client:
        packed = client.post("/v1/embeddings", json={"input": "x", "encoding_format": "base64"}).json()
        shown = client.post("/v1/embeddings", json={"input": "x", "encoding_format": "float"}).json()

    raw = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    np.testing.assert_array_equal(raw, np.array(shown["data"][0]["embedding"], dtype=np.float32))


def test_returns_2048_inputs_in_order(served: Served) -> None:
    texts = [f"text number {index}" for index in range(2048)]
    with served.client() as client:
        reply = client.post("/embed", json={"inputs": texts})
        few = client.post("/embed", json={"inputs": [texts[0], texts[1000], texts[2047]]}).json()

    vectors = np.array(reply.json())
    assert vectors.shape == (2048, 384)
    assert (vectors[[0, 1000, 2047]] * np.array(few)).sum(axis=1).min() > 0.9995


def test_the_consoles_rerank_example_ranks_its_answer_first(served: Served, repository: Path) -> None:
    source = repository / "gateway/api/operators/console/src/pages/playground/search-tab.tsx"
    page = source.read_text()
    query = re.search(r'useState\("(How long.*?)"\)', page)
    documents = re.search(r"const SEARCHED = `(.*?)`", page, re.DOTALL)
    assert query is not None
    assert documents is not None
    body = {"query": query[1], "documents": documents[1].splitlines()}
    with served.client() as client:
        best = client.post("/v1/rerank", json=body).json()["results"][0]

    assert "30 days" in body["documents"][best["index"]]


def test_rerank_tokenize_and_info_answer(served: Served) -> None:
    with served.client() as client:
        ranks = client.post("/rerank", json={"query": "fruit", "texts": ["a car", "an apple"]}).json()
        tokens = client.post("/tokenize", json={"inputs": "hello"}).json()
        info = client.get("/info").json()

    assert [rank["index"] for rank in ranks] == [1, 0]
    assert [token["text"] for token in tokens[0]] == ["[CLS]", "hello", "[SEP]"]
    assert info["max_input_length"] == 256
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}


def test_search_example_ranks_the_expected_functions_first(served: Served, repository: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(repository / "examples/search_docs.py")],
        env={"GATEWAY_URL": served.url, "GATEWAY_API_KEY": KEY, "PATH": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    first = {
        block.splitlines()[0]: re.findall(r"^  [\d.]+  (\S+)", block, re.MULTILINE)
        for block in ended.stdout.split("\n\n")[1:]
    }

    assert first["how to parse JSON"][0] in {"json.load", "json.loads"}
    assert first["wait for several tasks at once"][0] in {"asyncio.wait", "asyncio.gather"}
    assert "re.split" == first["split a string where a regular expression matches"][0]


def verified(config: Path) -> "subprocess.CompletedProcess[str]":
    """Run `gateway verify --json` until it exits."""
    words = [sys.executable, "-m", "gateway", "verify", "-c", str(config), "--json"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        words, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment
    )


def test_verify_starts_its_own_engine(repository: Path) -> None:
    ended = verified(repository / "router.yaml")
    report = json.loads(ended.stdout)

    assert (0, True) == (ended.returncode, report["agrees"])
    [member] = report["members"]
    assert ("torch", 384) == (member["backend"], member["dimensions"])
    assert member["least_norm"] == pytest.approx(1, abs=1e-3)


def test_server_is_served_by_its_url_alone(tmp_path: Path) -> None:
    with serve_in_thread(FakeTei()) as url:
        gateway = Served(tmp_path / "no-file", models=[url, "--port", "0"])
        try:
            with gateway.wait_until_up().client() as client:
                replies = [
                    client.post("/v1/embeddings", json={"model": "model", "input": "Hello"}),
                    client.post("/embed", json={"inputs": "Hello"}),
                ]
        finally:
            gateway.stop()

    assert [200, 200] == [reply.status_code for reply in replies]


def test_modules_in_the_current_folder_are_not_imported(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    for name in ("msgspec", "h2", "yaml", "torch"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(seen)!r}, 'a').write('{name} ')\nraise SystemExit(9)\n"
        )
    command = [sys.executable, "-P", "-m", "gateway", "serve"]
    with serve_in_thread(FakeTei()) as url:
        gateway = Served(tmp_path / "no-file", models=[url, "--port", "0"], command=command, folder=tmp_path)
        try:
            with gateway.wait_until_up().client() as client:
                reply = client.post("/v1/embeddings", json={"model": "model", "input": "Hello"})
        finally:
            gateway.stop()

    assert 200 == reply.status_code
    assert not seen.exists()


def test_verify_reports_why_an_engine_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "router.yaml").write_text(
        "upstreams: {x: {backend: torch, model: ./empty}}\nmodels: {m: {upstream: x}}\n"
    )
    ended = verified(tmp_path / "router.yaml")

    assert (1, "") == (ended.returncode, ended.stdout)
    assert "x: " in ended.stderr
    assert "is not a whole checkpoint" in ended.stderr


def test_lines_on_a_terminal_do_not_break_into_each_other(tmp_path: Path) -> None:
    (tmp_path / "router.yaml").write_text(
        "listen: 127.0.0.1:0\n"
        'upstreams: {one: {backend: tei, replicas: ["http://127.0.0.1:1"]}}\n'
        "models: {bge: {upstream: one}}\n"
    )
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "gateway", "serve", "-c", str(tmp_path / "router.yaml")]
    gateway = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "GATEWAY_API_KEY": KEY},
    )
    os.close(theirs)
    seen = ""
    try:
        while "curl " not in seen and select.select([ours], [], [], 60)[0]:
            seen += os.read(ours, 65536).decode(errors="replace")
    finally:
        gateway.terminate()
        gateway.wait(PATIENCE_S)
        os.close(ours)

    logged = [line for line in seen.splitlines() if " INFO " in line or " WARNING " in line]
    assert logged
    assert [] == [line for line in logged if not re.match(r"\d\d:\d\d:\d\d (INFO|WARNING) ", line)]
    # Neither a hidden cursor nor a line that is drawn again.
    assert [] == re.findall(r"\x1b\[(?:\?25l|\d*[AK])", seen)
