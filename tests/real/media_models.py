"""Small models of images and sound that real servers load: published configurations, random weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import transformers

from tests.engine.families import dual, pages
from tests.engine.families.checkpoint import write_checkpoint
from tests.engine.families.family import Family, Json

# vLLM's attention on a processor has heads of 32 numbers or more.
WIDTHS: Json = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}


def make_clip(folder: Path) -> Path:
    """Write a CLIP whose special tokens are the last ones, as in the published one.

    vLLM puts token 0 where an image is, and requires that it is not a special token.
    """
    last = dual.CLIP_CONFIG["text_config"]["vocab_size"] - 1
    # vLLM requires token embeddings as wide as the vectors, whose width it reads below `text_config`.
    width = WIDTHS["hidden_size"]
    texts = WIDTHS | {"bos_token_id": last - 1, "eos_token_id": last, "projection_dim": width}
    _make(dual.FAMILIES, "clip", folder, {"text_config": texts, "vision_config": WIDTHS}, width)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(_exchange_ids(json.loads(path.read_text()), last)))
    return folder


def make_wide_clip(folder: Path) -> Path:
    """Write a CLIP whose images have the network of ViT-B/32."""
    wide = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "intermediate_size": 3072}
    vision = wide | {"image_size": 224, "patch_size": 32}
    _make(dual.FAMILIES, "clip", folder, {"text_config": WIDTHS, "vision_config": vision})
    transformers.CLIPImageProcessorPil().save_pretrained(folder)
    return folder


def make_clap(folder: Path) -> Path:
    """Write a CLAP."""
    return _make(dual.FAMILIES, "clap", folder, {})


def make_reranker(folder: Path) -> Path:
    """Write a jina-reranker-m0: a Qwen2-VL with a head that scores its last token."""
    (family,) = (family for family in pages.FAMILIES if family.name == "colqwen2")
    whole, width = family.config["vlm_config"], WIDTHS["hidden_size"]
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    lengths = {"max_position_embeddings": 2048, "rope_parameters": rope}
    config = whole | {
        "architectures": ["JinaVLForRanking"],
        "text_config": whole["text_config"] | WIDTHS | lengths,
        "vision_config": whole["vision_config"] | {"embed_dim": width, "hidden_size": width, "num_heads": 2},
        # The head takes the place of the vocabulary's.
        "tie_word_embeddings": False,
    }
    head = {"score.0.weight": (width, width), "score.0.bias": (width,)}
    head |= {"score.2.weight": (1, width), "score.2.bias": (1,)}
    reranker = msgspec.structs.replace(
        family,
        network="Qwen2VLForConditionalGeneration",
        config=config,
        tokenizer_config=family.tokenizer_config | {"model_max_length": 2048},
        files=family.files | {"processor_config.json": {"processor_class": "Qwen2VLProcessor"}},
        extra=head,
    )
    if folder.exists():
        folder.rmdir()
    write_checkpoint(reranker, folder)
    # Of the published vocabulary, which this one is not.
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def _exchange_ids(tokenizer: Json, last: int) -> Json:
    """Return a tokenizer.json with ids 0 and 1 exchanged with the last two."""
    ids = {0: last - 1, 1: last, last - 1: 0, last: 1}
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: ids.get(number, number) for word, number in vocabulary.items()}
    for added in tokenizer["added_tokens"]:
        added["id"] = ids[added["id"]]
    template = tokenizer["post_processor"]["processors"][-1]
    for special in template["special_tokens"].values():
        special["ids"] = [ids[number] for number in special["ids"]]
    return tokenizer


def _make(
    families: tuple[Family, ...],
    name: str,
    folder: Path,
    changes: Mapping[str, Json],
    width: int | None = None,
) -> Path:
    """Write the checkpoint of a family. changes: by part of the configuration. width: of the vectors."""
    (family,) = (family for family in families if family.name == name)
    parts: dict[str, Any] = {part: family.config[part] | values for part, values in changes.items()}
    if width is not None:
        parts["projection_dim"] = width
    if folder.exists():
        folder.rmdir()
    return write_checkpoint(msgspec.structs.replace(family, config=family.config | parts), folder)
