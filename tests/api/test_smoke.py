"""A call passes through every stage and returns vectors."""

import base64

import numpy as np

from tests.conftest import Boots
from tests.fakes.tei import FakeTei, vector_of


async def test_returns_openai_embeddings_in_base64(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.post(
            "/v1/embeddings", {"input": ["a", "b"], "model": "bge", "encoding_format": "base64"}
        )

    assert reply.status_code == 200
    body = reply.json()
    vectors = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in body["data"]]
    np.testing.assert_array_equal(vector_of("a"), vectors[0])
    np.testing.assert_array_equal(vector_of("b"), vectors[1])
    assert body["usage"] == {"prompt_tokens": 6, "total_tokens": 6, "completion_tokens": 0}
    assert body["model"] == "bge"
