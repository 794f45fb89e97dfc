"""Test files that exercise what the product uses of its libraries: those of pytest's option --lowest.

`make test-lowest` runs them with the lowest allowed versions. Other files test the project's own logic on the
same few calls of a library, which these files make too.
"""

from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).parent
# Package with a floor in pyproject.toml → the files that use it in all ways in which the product does.
SURFACES: Mapping[str, tuple[str, ...]] = {
    # Messages parsed on both sides, also in pieces, and broken ones.
    "httptools": (
        "api/test_http_protocol.py",
        "api/test_fuzzed_connections.py",
        "backends/test_responses.py",
        "backends/test_fuzzed_replies.py",
    ),
    # Signatures, credentials, and the service models.
    "botocore": ("backends/test_bedrock.py",),
    "azure-identity": ("backends/test_clouds.py",),
    "google-auth": ("backends/test_google.py",),
    # Of google-auth's requests, through a proxy.
    "pysocks": ("backends/test_identity_proxies.py",),
    # Its errors, its limits, and transports of our own.
    "httpx": ("backends/test_http.py", "backends/test_http_connections.py", "unit/test_bench.py"),
    "huggingface-hub": ("backends/test_hub_fetch.py", "backends/test_checkpoints.py"),
    # Routes, its private plugins, its errors, and the document that it makes of the handlers.
    "litestar": (
        "api/test_smoke.py",
        "api/test_openapi.py",
        "api/test_bad_input.py",
        "api/test_error_envelopes.py",
        "api/test_start_page.py",
        "api/test_cors.py",
        "api/test_sign_in.py",
    ),
    # Structs with tags, defaults, bounds and renamed fields; its messages are rewritten for users.
    "msgspec": (
        "unit/test_config_load.py",
        "unit/test_addition_settings.py",
        "unit/test_batch_lines.py",
        "api/test_tei_dialect.py",
        "api/test_vllm_dialect.py",
        "api/test_embedding_fields.py",
    ),
    "multipart": ("api/test_batches.py",),
    "numpy": (
        "backends/test_outputs.py",
        "backends/test_replies.py",
        "unit/test_encoding.py",
        "unit/test_quantization.py",
        "unit/test_slices.py",
    ),
    "opentelemetry-sdk": ("api/test_traces.py", "unit/test_collector_metrics.py"),
    "opentelemetry-exporter-otlp-proto-http": ("api/test_exports_to_collector.py",),
    "orjson": ("unit/test_encoding.py", "api/test_openai_dialect.py"),
    # Private: the buckets of a histogram, and values per worker.
    "prometheus-client": ("api/test_metrics.py",),
    "pybase64": ("backends/test_without_base64.py", "backends/test_openai_backend.py"),
    "pyyaml": ("unit/test_config_load.py", "unit/test_litellm_config.py"),
    # Its connections are used one layer down.
    "redis": (
        "quotas/test_redis_connections.py",
        "quotas/test_redis_ledger.py",
        "quotas/test_redis_outages.py",
        "quotas/test_key_store.py",
    ),
    "rich": ("unit/test_status_view.py", "unit/test_output.py", "unit/test_bench.py"),
    "shtab": ("unit/test_completion.py",),
    "tokenizers": (
        "unit/test_token_counts.py",
        "backends/test_shared_tokenizers.py",
        "backends/test_counting.py",
        "backends/test_token_texts.py",
    ),
    # The protocol class is extended.
    "uvicorn": (
        "api/test_http_protocol.py",
        "api/test_connection_shares.py",
        "api/test_slow_clients.py",
        "api/test_unfinished_bodies.py",
        "api/test_broken_connections.py",
    ),
    "grpcio": (
        "api/test_grpc.py",
        "api/test_multiplexer.py",
        "api/test_http2_bounds.py",
        "api/test_fuzzed_rpcs.py",
        "backends/test_tei_grpc.py",
    ),
    "grpcio-health-checking": ("api/test_grpc.py",),
    "grpcio-reflection": ("api/test_http2_bounds.py",),
    "protobuf": ("backends/test_tei_protos.py", "backends/test_protobuf_vectors.py"),
    "pyarrow": ("api/test_arrow.py",),
    "pyjwt": ("api/test_sign_on.py", "api/test_sign_in.py"),
    "pillow": ("unit/test_pictures.py", "api/test_picture_dialects.py"),
    "obstore": ("unit/test_batch_objects.py",),
}
# Packages that only the pinned versions test. The tests of the built-in engine and of Lance would compute for
# minutes, and the build of PyTorch is the user's choice. Only processes of an installed gateway run uvloop.
PINNED_ONLY = {"transformers", "safetensors", "torch", "openvino", "soundfile", "soxr", "pylance", "uvloop"}


def is_about_a_library(path: Path) -> bool:
    """Return True if a test file is one of a library's surface."""
    return any(path == TESTS / file for files in SURFACES.values() for file in files)
