"""Embedding models of T5's encoder: sentence-t5, gtr and instructor."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from backends.contract import Embed
from backends.recipe.options import TaskSettings
from tests.engine.families.family import Answer, Family, Json, Served
from tests.engine.families.layout import HEADS, HIDDEN, INTERMEDIATE, LAYERS, dense_config, sentence_files
from tests.engine.families.references import TEXTS, sentence_vectors
from tests.engine.families.vocabularies import T5

CONFIG: Json = {
    "architectures": ["T5EncoderModel"],
    "d_ff": INTERMEDIATE,
    "d_kv": 8,
    "d_model": HIDDEN,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "feed_forward_proj": "relu",
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_decoder_layers": LAYERS,
    "num_heads": HEADS,
    "num_layers": LAYERS,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "torch_dtype": "float32",
    "use_cache": True,
}
TOKENIZER: Json = {"extra_ids": 0, "model_max_length": 512, "tokenizer_class": "T5Tokenizer"}
INSTRUCTION = "Represent the Science title: "


def instructed_vectors(folder: Path) -> Sequence[Answer]:
    """Embed as InstructorEmbedding does: the instruction is attended to, and left out of pooling."""
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": "float32"})
    model.set_pooling_include_prompt(include_prompt=False)
    assert not any(module.include_prompt for module in model if isinstance(module, Pooling))
    answers = []
    for name in (None, "title"):
        vectors = model.encode(TEXTS, prompt_name=name, normalize_embeddings=True)
        answers.append(Answer(Embed(tuple(TEXTS), prompt_name=name), np.asarray(vectors, np.float32)))
    return answers


FAMILIES = (
    Family(
        name="sentence-t5",
        checkpoints=(
            "sentence-transformers/sentence-t5-base",
            "sentence-transformers/sentence-t5-large",
            "sentence-transformers/sentence-t5-xl",
            "sentence-transformers/sentence-t5-xxl",
        ),
        kind="dense",
        state=Served(packed=False),
        network="T5EncoderModel",
        config=CONFIG,
        vocabulary=T5,
        tokenizer_config=TOKENIZER,
        files=sentence_files("mean", max_seq_length=256, dense=dense_config(48, bias=False)),
        reference=sentence_vectors,
        pooling="mean",
    ),
    Family(
        name="gtr-t5",
        checkpoints=(
            "sentence-transformers/gtr-t5-base",
            "sentence-transformers/gtr-t5-large",
            "sentence-transformers/gtr-t5-xl",
            "sentence-transformers/gtr-t5-xxl",
        ),
        kind="dense",
        state=Served(packed=False),
        network="T5EncoderModel",
        config=CONFIG | {"feed_forward_proj": "gated-gelu"},
        vocabulary=T5,
        tokenizer_config=TOKENIZER,
        files=sentence_files("mean", max_seq_length=512, dense=dense_config(48, bias=False)),
        reference=sentence_vectors,
        pooling="mean",
    ),
    Family(
        name="instructor",
        checkpoints=("hkunlp/instructor-base", "hkunlp/instructor-large", "hkunlp/instructor-xl"),
        kind="dense",
        state=Served(packed=False),
        network="T5EncoderModel",
        config=CONFIG,
        vocabulary=T5,
        tokenizer_config=TOKENIZER,
        files=sentence_files(
            "mean", max_seq_length=512, dense=dense_config(48, bias=False), prompts={"title": INSTRUCTION}
        ),
        reference=instructed_vectors,
        pooling="mean",
        settings=TaskSettings(model="hkunlp/instructor-large"),
        notes="instructions as prompts; from a folder: `include_prompt: false` in 1_Pooling/config.json",
    ),
)
