"""Small dual encoders with random weights, written with the configuration classes of transformers."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from backends.contract import Vectors
from tests.engine.families.checkpoint import randomize

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
PICTURES = SMALL | {"image_size": 32, "patch_size": 8}
TEXTS_OF_BERT = SMALL | {"vocab_size": 30522}
# [CLS], [SEP] and [PAD] of the tokenizer that all of them have.
ENDS = {"bos_token_id": 101, "eos_token_id": 102, "pad_token_id": 0}
SIDES = {"height": 32, "width": 32}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


class DualModel(NamedTuple):
    """Network of transformers, its processor, and options of its tokenizer.

    tokens: image tokens of one picture.
    """

    network: Any
    processor: Any
    tokenizing: Mapping[str, Any]
    tokens: int


def _clip() -> DualModel:
    config = transformers.CLIPConfig(
        text_config=TEXTS_OF_BERT | ENDS, vision_config=PICTURES, projection_dim=24
    )
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=SIDES)
    return DualModel(transformers.CLIPModel(config), processor, {"padding": True, "max_length": 77}, 17)


def _siglip() -> DualModel:
    config = transformers.SiglipConfig(text_config=TEXTS_OF_BERT, vision_config=PICTURES)
    processor = transformers.SiglipImageProcessorPil(size=SIDES)
    return DualModel(transformers.SiglipModel(config), processor, PADDED, 16)


def _siglip2() -> DualModel:
    pictures = SMALL | {"num_patches": 16, "patch_size": 8}
    config = transformers.Siglip2Config(text_config=TEXTS_OF_BERT, vision_config=pictures)
    processor = transformers.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16)
    return DualModel(transformers.Siglip2Model(config), processor, PADDED, 16)


def _clap() -> DualModel:
    sound = {
        "spec_size": 32,
        "num_mel_bins": 8,
        "patch_size": 4,
        "patch_stride": [4, 4],
        "window_size": 4,
        "depths": [2, 2],
        "num_attention_heads": [2, 4],
        "patch_embeds_hidden_size": 16,
        "hidden_size": 32,
        "num_hidden_layers": 2,
    }
    texts = TEXTS_OF_BERT | ENDS | {"max_position_embeddings": 66, "projection_dim": 24}
    config = transformers.ClapConfig(text_config=texts, audio_config=sound, projection_dim=24)
    processor = transformers.ClapFeatureExtractor(
        feature_size=8, max_length_s=1, truncation="rand_trunc", padding="repeatpad"
    )
    return DualModel(transformers.ClapModel(config), processor, {"padding": True, "max_length": 64}, 16)


PADDED = {"padding": "max_length", "max_length": 64}
MAKERS: dict[str, Callable[[], DualModel]] = {"clip": _clip, "siglip": _siglip, "siglip2": _siglip2}
SOUND_MAKERS: dict[str, Callable[[], DualModel]] = {"clap": _clap}


def make_dual(name: str, tokenizer: Path, folder: Path) -> DualModel:
    """Write a checkpoint with the tokenizer of another; return its model as the reference."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    model = (MAKERS | SOUND_MAKERS)[name]()
    randomize(model.network.eval())
    model.network.save_pretrained(folder)
    model.processor.save_pretrained(folder)
    for file in TOKENIZER_FILES:
        shutil.copy(tokenizer / file, folder / file)
    path = folder / "tokenizer_config.json"
    inputs = ["input_ids"] if model.tokenizing is PADDED else ["input_ids", "attention_mask"]
    config = json.loads(path.read_text()) | {
        "model_input_names": inputs,
        "model_max_length": model.tokenizing["max_length"],
    }
    path.write_text(json.dumps(config))
    return model


@torch.inference_mode()
def text_vectors(model: DualModel, folder: Path, texts: list[str]) -> Vectors:
    """Embed texts with transformers: (n, dim)."""
    names = json.loads((folder / "tokenizer_config.json").read_text())["model_input_names"]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]", model_input_names=names
    )
    inputs = tokenizer(texts, truncation=True, return_tensors="pt", **model.tokenizing)
    vectors: Vectors = model.network.get_text_features(**inputs).pooler_output.numpy()
    return vectors


@torch.inference_mode()
def picture_vectors(model: DualModel, pictures: list[Any]) -> Vectors:
    """Embed pictures with transformers: (n, dim)."""
    rows = [
        model.network.get_image_features(**model.processor(images=picture, return_tensors="pt"))
        for picture in pictures
    ]
    return np.concatenate([row.pooler_output.numpy() for row in rows])


@torch.inference_mode()
def sound_vectors(model: DualModel, recordings: list[Any]) -> Vectors:
    """Embed recordings of the processor's rate with transformers: (n, dim)."""
    rate = model.processor.sampling_rate
    rows = [
        model.network.get_audio_features(**model.processor(samples, sampling_rate=rate, return_tensors="pt"))
        for samples in recordings
    ]
    return np.concatenate([row.pooler_output.numpy() for row in rows])
