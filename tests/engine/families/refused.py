"""Models that the engine does not serve: models of images and sound."""

from tests.engine.families.family import Family, Refused
from tests.engine.families.vocabularies import BERT


def of_media(name: str, checkpoints: tuple[str, ...], model_type: str, architecture: str) -> Family:
    """Return a family of networks that read other media than text."""
    return Family(
        name=name,
        checkpoints=checkpoints,
        kind="images",
        state=Refused("reads images", "reads images or sound"),
        network="",
        config={
            "architectures": [architecture],
            "model_type": model_type,
            "vision_config": {"hidden_size": 32},
            "text_config": {"hidden_size": 32},
        },
        vocabulary=BERT,
    )


FAMILIES = (
    of_media(
        "qwen3-vl-embedding", ("Qwen/Qwen3-VL-Embedding-2B",), "qwen3_vl", "Qwen3VLForConditionalGeneration"
    ),
)
