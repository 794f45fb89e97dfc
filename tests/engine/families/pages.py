"""Encoders of pages: a vector per token of a query, and per patch of a page's picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from backends.contract import EmbedParts, Encode, Output
from tests.engine.families.family import Answer, Family, Json, Served
from tests.engine.families.layout import HEADS, HIDDEN, SIZES
from tests.engine.families.references import TEXTS
from tests.engine.families.vocabularies import COLPALI, COLQWEN2, vocabulary_size

WIDTH = 16
PATCH = 14
# Words that the processor of ColPali adds to the vocabulary.
ADDED_WORDS = 1024 + 128
QUERY_LENGTH = 512
PICTURES = ((120, 90), (60, 200), (300, 40), (60, 200))
NORMAL: Json = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
}
QWEN_TEXTS: Json = SIZES | {
    "model_type": "qwen2_vl_text",
    "num_key_value_heads": 2,
    "vocab_size": vocabulary_size(COLQWEN2),
    "max_position_embeddings": QUERY_LENGTH,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
}
QWEN_PICTURES: Json = {
    "depth": 2,
    "embed_dim": HIDDEN,
    "hidden_size": HIDDEN,
    "num_heads": HEADS,
    "mlp_ratio": 2,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
GEMMA_TEXTS: Json = SIZES | {
    "model_type": "gemma",
    "num_key_value_heads": 1,
    "head_dim": HIDDEN // HEADS,
    "vocab_size": vocabulary_size(COLPALI) + ADDED_WORDS,
    "max_position_embeddings": QUERY_LENGTH,
}
GEMMA_PICTURES: Json = SIZES | {
    "model_type": "siglip_vision_model",
    "image_size": 2 * PATCH,
    "patch_size": PATCH,
    "projection_dim": HIDDEN,
}


def soften(folder: Path, share: float = 0.5, but: str | None = None) -> None:
    """Scale all matrices: single patches of a made network would differ by the rounding of bfloat16.

    but: part of the names of matrices that stay as they are.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if tensor.dim() > 1 and (but is None or but not in name):
            tensors[name] = tensor * share
    save_file(tensors, path, {"format": "pt"})


@torch.inference_mode()
def page_vectors(network: Any, processor: Any, folder: Path) -> Sequence[Answer]:
    """Embed queries and pages with transformers, one at a time."""
    from tests.pictures import encoded, noise, part_of

    model = network.from_pretrained(folder, dtype=torch.float32).eval()
    reader = processor(
        transformers.AutoImageProcessor.from_pretrained(folder, backend="pil"),
        transformers.AutoTokenizer.from_pretrained(folder),
    )
    pictures = [noise(*size, seed) for seed, size in enumerate(PICTURES)]
    queries = [vectors_of(model, reader.process_queries(text=[text])) for text in TEXTS]
    pages = [vectors_of(model, reader.process_images(images=[picture])) for picture in pictures]
    parts = tuple((part_of(encoded(picture)),) for picture in pictures)
    return [
        Answer(Encode(tuple(TEXTS), frozenset({Output.MULTIVECTOR})), np.concatenate(queries)),
        Answer(EmbedParts(parts, Output.MULTIVECTOR), np.concatenate(pages)),
    ]


def vectors_of(model: Any, inputs: Any) -> Any:
    return (
        model(**{name: tensor for name, tensor in inputs.items() if name != "labels"}).embeddings[0].numpy()
    )


def colpali_vectors(folder: Path) -> Sequence[Answer]:
    return page_vectors(transformers.ColPaliForRetrieval, transformers.ColPaliProcessor, folder)


def colqwen2_vectors(folder: Path) -> Sequence[Answer]:
    return page_vectors(transformers.ColQwen2ForRetrieval, transformers.ColQwen2Processor, folder)


FAMILIES = (
    Family(
        name="colpali",
        checkpoints=("vidore/colpali-v1.2-hf", "vidore/colpali-v1.3-hf"),
        kind="pages",
        state=Served(packed=False),
        network="ColPaliForRetrieval",
        config={
            "architectures": ["ColPaliForRetrieval"],
            "model_type": "colpali",
            "embedding_dim": WIDTH,
            "vlm_config": {
                "model_type": "paligemma",
                "text_config": GEMMA_TEXTS,
                "vision_config": GEMMA_PICTURES,
                "image_token_index": COLPALI.token_id("<image>"),
                "projection_dim": HIDDEN,
            },
        },
        vocabulary=COLPALI,
        tokenizer_config={"model_max_length": QUERY_LENGTH, "add_bos_token": False},
        files={
            "preprocessor_config.json": NORMAL
            | {
                "image_processor_type": "SiglipImageProcessor",
                "image_seq_length": 4,
                "size": {"height": 2 * PATCH, "width": 2 * PATCH},
            },
            "processor_config.json": {"processor_class": "ColPaliProcessor"},
        },
        write=soften,
        reference=colpali_vectors,
        notes="queries and images of pages",
    ),
    Family(
        name="colqwen2",
        checkpoints=("vidore/colqwen2-v1.0-hf",),
        kind="pages",
        state=Served(packed=False),
        network="ColQwen2ForRetrieval",
        config={
            "architectures": ["ColQwen2ForRetrieval"],
            "model_type": "colqwen2",
            "embedding_dim": WIDTH,
            "vlm_config": {
                "model_type": "qwen2_vl",
                "text_config": QWEN_TEXTS,
                "vision_config": QWEN_PICTURES,
                "image_token_id": COLQWEN2.token_id("<|image_pad|>"),
                "video_token_id": COLQWEN2.token_id("<|video_pad|>"),
                "vision_start_token_id": COLQWEN2.token_id("<|vision_start|>"),
                "vision_end_token_id": COLQWEN2.token_id("<|vision_end|>"),
            },
        },
        vocabulary=COLQWEN2,
        tokenizer_config={"model_max_length": QUERY_LENGTH, "tokenizer_class": "Qwen2Tokenizer"},
        files={
            "preprocessor_config.json": NORMAL
            | {
                "image_processor_type": "Qwen2VLImageProcessor",
                "max_pixels": 28 * 28 * 16,
                "merge_size": 2,
                "min_pixels": 56 * 56,
                "patch_size": PATCH,
                "temporal_patch_size": 2,
            },
            "processor_config.json": {"processor_class": "ColQwen2Processor"},
        },
        write=soften,
        reference=colqwen2_vectors,
        notes="queries and images of pages",
    ),
)
