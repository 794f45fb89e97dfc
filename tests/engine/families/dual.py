"""Dual encoders: texts and pictures with vectors in one space."""

import json
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer

from backends.contract import Audio, Embed, EmbedParts
from tests.engine.families.family import Answer, Family, Json, Served
from tests.engine.families.layout import PACKAGE, SIZES
from tests.engine.families.references import TEXTS, auto_tokenizer_ids
from tests.engine.families.vocabularies import CLIP, ROBERTA, SIGLIP, SIGLIP2, Vocabulary, vocabulary_size

PICTURE_SIDE, PATCH = 32, 8
SIDES = {"height": PICTURE_SIDE, "width": PICTURE_SIDE}
PICTURES: Json = SIZES | {"image_size": PICTURE_SIDE, "patch_size": PATCH}
NO_MASK: Json = {"model_max_length": 64, "model_input_names": ["input_ids"]}
CLIP_PROCESSOR: Json = {
    "crop_size": PICTURE_SIDE,
    "do_center_crop": True,
    "do_normalize": True,
    "do_resize": True,
    "feature_extractor_type": "CLIPFeatureExtractor",
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "size": PICTURE_SIDE,
}
SIGLIP_PROCESSOR: Json = {
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "SiglipImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "SiglipProcessor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": SIDES,
}
SOUNDS: Json = {
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
    "projection_dim": 24,
}
CLAP_PROCESSOR: Json = {
    "feature_extractor_type": "ClapFeatureExtractor",
    "feature_size": 8,
    "fft_window_size": 1024,
    "frequency_max": 14000,
    "frequency_min": 50,
    "hop_length": 480,
    "max_length_s": 1,
    "padding": "repeatpad",
    "sampling_rate": 48000,
    "top_db": None,
}
NAFLEX_PROCESSOR: Json = {
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Siglip2ImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "max_num_patches": 16,
    "patch_size": PATCH,
    "processor_class": "Siglip2Processor",
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
}


def text_config(vocabulary: Vocabulary, **values: Any) -> Json:
    return SIZES | {"vocab_size": vocabulary_size(vocabulary), **values}


@torch.inference_mode()
def dual_vectors(folder: Path) -> Sequence[Answer]:
    """Embed texts and pictures with transformers, from the token ids of `ids_of`."""
    from tests.pictures import encoded, noise, part_of

    network = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    rows = []
    for row in ids_of(folder, TEXTS, config["model_max_length"]):
        ids = row
        if "attention_mask" not in config.get("model_input_names", ["attention_mask"]):
            pad = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(config["pad_token"])
            assert pad is not None
            ids = row + [pad] * (config["model_max_length"] - len(row))
        rows.append(network.get_text_features(input_ids=torch.tensor([ids])).pooler_output)
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    pictures = [noise(20 + 9 * i, 50 - 3 * i, i) for i in range(5)]
    seen = [
        network.get_image_features(**processor(images=picture, return_tensors="pt")).pooler_output
        for picture in pictures
    ]
    parts = tuple((part_of(encoded(picture)),) for picture in pictures)
    return [
        Answer(Embed(tuple(TEXTS)), np.concatenate(rows)),
        Answer(EmbedParts(parts), np.concatenate(seen)),
    ]


@torch.inference_mode()
def sound_vectors(folder: Path) -> Sequence[Answer]:
    """Embed texts and recordings with transformers."""
    from tests.engine.sounds import recorded, tone

    network = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [
        network.get_text_features(input_ids=torch.tensor([ids])).pooler_output
        for ids in auto_tokenizer_ids(folder, TEXTS, 512)
    ]
    processor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    rate = processor.sampling_rate
    sounds = [tone(0.2 + 0.2 * i, rate, seed=i) for i in range(5)]
    heard = [
        network.get_audio_features(
            **processor(sound[:, 0], sampling_rate=rate, return_tensors="pt")
        ).pooler_output
        for sound in sounds
    ]
    parts = tuple((Audio(recorded(sound, rate, "WAV", "FLOAT"), "audio/wav"),) for sound in sounds)
    return [
        Answer(Embed(tuple(TEXTS)), np.concatenate(rows)),
        Answer(EmbedParts(parts), np.concatenate(heard)),
    ]


def clap_family(name: str, checkpoints: tuple[str, ...], *, fused: bool) -> Family:
    """Return a family of CLAP. fused: it reads a long recording in several parts."""
    fusion: Json = {"enable_fusion": True, "fusion_type": "aff_2d"}
    truncation = "fusion" if fused else "rand_trunc"
    return Family(
        name=name,
        checkpoints=checkpoints,
        kind="dual",
        state=Served(packed=False),
        network="ClapModel",
        config={
            "architectures": ["ClapModel"],
            "model_type": "clap",
            "projection_dim": 24,
            "text_config": text_config(ROBERTA, projection_dim=24, max_position_embeddings=514),
            "audio_config": SOUNDS | (fusion if fused else {}),
        },
        vocabulary=ROBERTA,
        tokenizer_config={"model_max_length": 512, "tokenizer_class": "RobertaTokenizer"},
        files={"preprocessor_config.json": CLAP_PROCESSOR | {"truncation": truncation}},
        reference=sound_vectors,
        pooling="first token",
        notes="texts and sound",
    )


def ids_of(folder: Path, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Tokenize with the checkpoint's class; SigLIP's needs a file of sentencepiece, which is not here."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if config.get("tokenizer_class") != "SiglipTokenizer":
        return auto_tokenizer_ids(folder, texts, max_tokens)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(max_tokens)
    return [tokenizer.encode(canonical(text)).ids for text in texts]


def canonical(text: str) -> str:
    """Return a text as SigLIP's tokenizer reads it."""
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\s+", " ", plain).strip()


CLIP_FOLDER = "0_CLIPModel"
CLIP_CONFIG: Json = {
    "architectures": ["CLIPModel"],
    "model_type": "clip",
    "projection_dim": 24,
    "text_config": text_config(CLIP, bos_token_id=0, eos_token_id=1, max_position_embeddings=77),
    "vision_config": PICTURES,
}


def into_module(folder: Path) -> None:
    """Move all files into the folder of a module, with CLIP's vocabulary as its library writes it."""
    inner = folder / CLIP_FOLDER
    inner.mkdir()
    for path in [path for path in folder.iterdir() if path.is_file() and path.name != "modules.json"]:
        path.rename(inner / path.name)
    tokenizer = json.loads((inner / "tokenizer.json").read_text())
    (inner / "tokenizer.json").unlink()
    (inner / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]))
    merges = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    (inner / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))


def clip_family(name: str, checkpoints: tuple[str, ...], **fields: Any) -> Family:
    """Return a family of CLIP. fields: that differ."""
    return Family(
        name=name,
        checkpoints=checkpoints,
        kind="dual",
        state=Served(packed=False),
        network="CLIPModel",
        config=CLIP_CONFIG,
        vocabulary=CLIP,
        tokenizer_config={"model_max_length": 77, "tokenizer_class": "CLIPTokenizer"},
        pooling="end token",
        notes="texts and images",
        **fields,
    )


FAMILIES = (
    clip_family(
        "clip",
        (
            "openai/clip-vit-base-patch32",
            "openai/clip-vit-base-patch16",
            "openai/clip-vit-large-patch14",
            "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
            "patrickjohncyh/fashion-clip",
        ),
        files={"preprocessor_config.json": CLIP_PROCESSOR},
        reference=dual_vectors,
        token_ids=ids_of,
    ),
    clip_family(
        "clip-module",
        ("sentence-transformers/clip-ViT-B-32", "sentence-transformers/clip-ViT-L-14"),
        files={
            "preprocessor_config.json": CLIP_PROCESSOR,
            "modules.json": [{"idx": 0, "name": "0", "path": CLIP_FOLDER, "type": f"{PACKAGE}.CLIPModel"}],
        },
        write=into_module,
        reference=lambda folder: dual_vectors(folder / CLIP_FOLDER),
        token_ids=ids_of,
    ),
    Family(
        name="siglip",
        checkpoints=("google/siglip-base-patch16-224", "google/siglip-so400m-patch14-384"),
        kind="dual",
        state=Served(packed=False),
        network="SiglipModel",
        config={
            "architectures": ["SiglipModel"],
            "model_type": "siglip",
            "text_config": text_config(SIGLIP) | {"model_type": "siglip_text_model"},
            "vision_config": PICTURES | {"model_type": "siglip_vision_model"},
        },
        vocabulary=SIGLIP,
        tokenizer_config=NO_MASK | {"do_lower_case": True, "tokenizer_class": "SiglipTokenizer"},
        files={"preprocessor_config.json": SIGLIP_PROCESSOR},
        reference=dual_vectors,
        token_ids=ids_of,
        pooling="last token",
        notes="texts and images",
    ),
    Family(
        name="siglip2",
        checkpoints=("google/siglip2-base-patch16-224", "google/siglip2-so400m-patch14-384"),
        kind="dual",
        state=Served(packed=False),
        network="SiglipModel",
        config={
            "architectures": ["SiglipModel"],
            "model_type": "siglip",
            "text_config": text_config(SIGLIP2) | {"model_type": "siglip_text_model"},
            "vision_config": PICTURES | {"model_type": "siglip_vision_model"},
        },
        vocabulary=SIGLIP2,
        tokenizer_config=NO_MASK
        | {
            "add_bos_token": False,
            "add_eos_token": True,
            "padding_side": "right",
            "tokenizer_class": "GemmaTokenizer",
        },
        files={"preprocessor_config.json": SIGLIP_PROCESSOR},
        reference=dual_vectors,
        token_ids=ids_of,
        pooling="last token",
        notes="texts and images; write texts in small letters, as in training",
    ),
    Family(
        name="siglip2-naflex",
        checkpoints=("google/siglip2-base-patch16-naflex",),
        kind="dual",
        state=Served(packed=False),
        network="Siglip2Model",
        config={
            "architectures": ["Siglip2Model"],
            "model_type": "siglip2",
            "text_config": text_config(SIGLIP2) | {"model_type": "siglip2_text_model"},
            "vision_config": SIZES
            | {"model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": PATCH},
        },
        vocabulary=SIGLIP2,
        tokenizer_config=NO_MASK
        | {
            "add_bos_token": False,
            "add_eos_token": True,
            "padding_side": "right",
            "tokenizer_class": "GemmaTokenizer",
        },
        files={"preprocessor_config.json": NAFLEX_PROCESSOR},
        reference=dual_vectors,
        token_ids=ids_of,
        pooling="last token",
        notes="texts and images of any shape",
    ),
    clap_family("clap", ("laion/clap-htsat-unfused", "laion/larger_clap_general"), fused=False),
    clap_family("clap-fused", ("laion/clap-htsat-fused",), fused=True),
)
