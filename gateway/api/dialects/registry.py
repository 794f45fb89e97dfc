"""The dialects that the gateway serves. A new one is a folder, and its name here."""

from gateway.api.dialects.batches import dialect as batches
from gateway.api.dialects.cohere import dialect as cohere
from gateway.api.dialects.gemini import dialect as gemini
from gateway.api.dialects.huggingface import dialect as huggingface
from gateway.api.dialects.infinity import dialect as infinity
from gateway.api.dialects.nim import dialect as nim
from gateway.api.dialects.ollama import dialect as ollama
from gateway.api.dialects.openai import dialect as openai
from gateway.api.dialects.qdrant import dialect as qdrant
from gateway.api.dialects.sie import dialect as sie
from gateway.api.dialects.tei import dialect as tei
from gateway.api.dialects.vllm import dialect as vllm
from gateway.api.dialects.voyage import dialect as voyage
from gateway.api.dialects.weaviate import dialect as weaviate
from gateway.api.dialects.xinference import dialect as xinference

# In the order of the OpenAPI document: what most callers need comes first.
DIALECTS = (
    *(
        module.DIALECT
        for module in (openai, tei, huggingface, cohere, nim, voyage, xinference, vllm, infinity)
    ),
    openai.AZURE,
    *(module.DIALECT for module in (gemini, ollama, qdrant, weaviate, batches, sie)),
)
