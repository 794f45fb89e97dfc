"""Models that the engine does not serve: static tables of vectors, and models of images."""

from tests.engine.families.family import Family, Json, Refused
from tests.engine.families.vocabularies import BERT

STATIC_FILES: Json = {
    "modules.json": [
        {
            "idx": 0,
            "name": "0",
            "path": "0_StaticEmbedding",
            "type": "sentence_transformers.models.StaticEmbedding",
        },
    ],
}

FAMILIES = (
    Family(
        name="static-embedding",
        checkpoints=(
            "sentence-transformers/static-retrieval-mrl-en-v1",
            "sentence-transformers/static-similarity-mrl-multilingual-v1",
        ),
        kind="static",
        state=Refused("no module StaticEmbedding", "module StaticEmbedding"),
        network="",
        config={},
        vocabulary=BERT,
        files=STATIC_FILES,
        pooling="mean",
    ),
    Family(
        name="clip",
        checkpoints=("sentence-transformers/clip-ViT-B-32",),
        kind="images",
        state=Refused("reads images", "module CLIPModel"),
        network="",
        config={},
        vocabulary=BERT,
        files={
            "modules.json": [
                {
                    "idx": 0,
                    "name": "0",
                    "path": "0_CLIPModel",
                    "type": "sentence_transformers.models.CLIPModel",
                }
            ]
        },
    ),
)
