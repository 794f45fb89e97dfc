"""Dual encoders against transformers: texts and pictures of many formats, alone and in any batch."""

import asyncio
import base64
import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from backends.contract import Audio, Chat, Embed, EmbedParts, EmbedReply, Image, Operation, Output, Truncate
from backends.contract.errors import InvalidWork, ModelUnavailable, UnsupportedWork
from backends.recipe.checkpoint import read_recipe
from backends.recipe.options import DTypeName, TaskSettings
from backends.torch import wire
from backends.torch.load.inspection import inspect_folder
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import estimate_bytes, load
from backends.torch.media.features import open_image_reader
from backends.torch.passes.engine import Engine
from backends.torch.stock.architectures import read_config
from tests.engine.engines import cosines, engine_on, load_tiny, run_work
from tests.engine.texts import PHRASES

pytest.importorskip("PIL", reason="pictures need the extra `media`")

from transformers.image_utils import load_image

from tests.engine.dual_checkpoints import (
    MAKERS,
    DualModel,
    make_dual,
    picture_vectors,
    text_vectors,
)
from tests.pictures import DEEP, deep_in_8_bits, encoded, noise, part_of, pictures, png_of_size

TEXTS = [*PHRASES[:6], "a", "word " * 100]
LEAST_COSINE: dict[DTypeName, float] = {"float32": 0.9999, "bfloat16": 0.9995}


class Checkpoints:
    """Checkpoints of this module, each written once."""

    def __init__(self, tokenizer: Path, folder: Path) -> None:
        self._tokenizer, self._folder = tokenizer, folder
        self.model = cache(self._model)
        self.engine = cache(self._engine)

    def folder(self, name: str) -> Path:
        self.model(name)
        return self._folder / name

    def copy(self, name: str, target: Path) -> Path:
        """Write the same checkpoint once more, to be changed."""
        make_dual(name, self._tokenizer, target)
        return target

    def _model(self, name: str) -> DualModel:
        return make_dual(name, self._tokenizer, self._folder / name)

    def _engine(self, name: str, dtype: DTypeName = "float32") -> Engine:
        return engine_on(load_tiny(self.folder(name), dtype))


@pytest.fixture(scope="module")
def checkpoints(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(minilm, tmp_path_factory.mktemp("dual"))


@cache
def parts() -> tuple[tuple[Image], ...]:
    return tuple((part_of(data),) for data in pictures().values())


@cache
def reference_pictures() -> list[object]:
    # transformers makes white of a grey picture of 16 bits: the same in 8 bits takes its place.
    return [
        load_image(base64.b64encode(deep_in_8_bits() if name == DEEP else data).decode())
        for name, data in pictures().items()
    ]


def run(checkpoints: Checkpoints, work: EmbedParts, name: str = "clip") -> EmbedReply:
    # A future belongs to one event loop, an engine to none.
    return asyncio.run(run_work(checkpoints.engine(name), work, EmbedReply))


@pytest.mark.parametrize("name", MAKERS)
def test_pictures_have_the_features_of_transformers_bit_for_bit(name: str, checkpoints: Checkpoints) -> None:
    folder, processor = checkpoints.folder(name), checkpoints.model(name).processor
    reader = open_image_reader(folder, read_config(folder))
    assert len(parts()) >= 50

    for (part,), picture in zip(parts(), reference_pictures(), strict=True):
        features = reader.read(part, Truncate.ERROR).sequence.features
        assert features is not None
        expected = processor(images=picture, return_tensors="np")
        assert features.arrays.keys() == expected.keys()
        for key, array in features.arrays.items():
            np.testing.assert_array_equal(array, expected[key])
        assert features.tokens == checkpoints.model(name).tokens


@pytest.mark.parametrize("dtype", LEAST_COSINE)
@pytest.mark.parametrize("name", MAKERS)
def test_texts_and_pictures_have_the_vectors_of_transformers(
    name: str, dtype: DTypeName, checkpoints: Checkpoints
) -> None:
    model, folder = checkpoints.model(name), checkpoints.folder(name)
    engine = checkpoints.engine(name, dtype)
    expected = np.concatenate(
        [text_vectors(model, folder, TEXTS), picture_vectors(model, reference_pictures())]
    )

    async def compute() -> list[EmbedReply]:
        mixed = EmbedParts((*((text,) for text in TEXTS), *parts()))
        works = [mixed, Embed(tuple(TEXTS)), *(EmbedParts((part,)) for part in parts()[::6])]
        return list(await asyncio.gather(*(run_work(engine, work, EmbedReply) for work in works)))

    mixed, texts, *alone = asyncio.run(compute())

    assert cosines(mixed.vectors, expected).min() >= LEAST_COSINE[dtype]
    assert cosines(texts.vectors, expected[: len(TEXTS)]).min() >= LEAST_COSINE[dtype]
    singles = np.concatenate([reply.vectors for reply in alone])
    assert cosines(singles, expected[len(TEXTS) :: 6]).min() >= LEAST_COSINE[dtype]
    # Vectors that all point in one direction would agree after any computation.
    assert cosines(expected[:1], expected[1:]).min() < 0.9
    assert mixed.truncated == (len(TEXTS) - 1,)


def test_capabilities_name_the_operation_and_the_width(checkpoints: Checkpoints) -> None:
    found = load_tiny(checkpoints.folder("clip")).capabilities

    assert Operation.EMBED_IMAGE in found.operations
    assert Operation.EMBED_AUDIO not in found.operations
    assert (found.dimensions, found.max_input_tokens) == (24, 77)


def test_tokens_are_patches_and_words(checkpoints: Checkpoints) -> None:
    reply = run(checkpoints, EmbedParts(((TEXTS[6],), parts()[0])))

    assert reply.input_tokens == (3, 17)
    assert reply.tokens == 20


def test_dimensions_and_scaling_apply_to_pictures(checkpoints: Checkpoints) -> None:
    whole = run(checkpoints, EmbedParts(parts()[:2], normalize=False)).vectors
    short = run(checkpoints, EmbedParts(parts()[:2], dimensions=8)).vectors

    expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(short, expected, atol=1e-6)


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><rect width="9" height="9"/></svg>'
DAMAGED = {
    "half of a PNG": (encoded(noise(64, 64))[:3000], "damaged"),
    "half of a JPEG": (encoded(noise(64, 64), "JPEG")[:900], "damaged"),
    "no picture": (b"hello", "no picture of these formats"),
    "nothing": (b"", "no picture of these formats"),
    "SVG": (SVG, "no picture of these formats"),
    "TIFF": (encoded(noise(9, 9), "TIFF"), "no picture of these formats"),
    "bomb": (png_of_size(30_000, 30_000), "pixels"),
    "larger bomb": (png_of_size(60_000, 60_000), "pixels"),
    "too narrow": (encoded(noise(1, 1).resize((140_000, 1))), "too narrow"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_picture_is_an_error_of_its_input(kind: str, checkpoints: Checkpoints) -> None:
    data, message = DAMAGED[kind]
    bad = Image(data, "image/png", 64, 64)

    with pytest.raises(InvalidWork, match=message) as failure:
        run(checkpoints, EmbedParts((parts()[0], (bad,), parts()[1])))

    assert failure.value.input_index == 1
    assert run(checkpoints, EmbedParts(parts()[:1])).vectors.shape == (1, 24)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (EmbedParts((("a",), ("a picture of", b"")), chat=Chat()), "input 1 has 2 parts"),
        (EmbedParts(((Audio(b"RIFF", "audio/wav"), b""),)), "does not embed_audio"),
        (EmbedParts(((b"",),), output=Output.MULTIVECTOR), "no multivector"),
        (EmbedParts(((b"",),), chat=Chat(template="{{ x }}")), "no chat template"),
        (EmbedParts(((b"",),), dimensions=25), "`dimensions` must be between 1 and 24"),
        (EmbedParts(((b"",), ("word " * 100,)), truncate=Truncate.ERROR), "maximum context length"),
    ],
)
def test_requests_that_the_model_cannot_compute_are_refused(
    work: EmbedParts, message: str, checkpoints: Checkpoints
) -> None:
    # Bytes stand for a picture in the table.
    picture = parts()[0][0]
    inputs = tuple(tuple(picture if part == b"" else part for part in item) for item in work.inputs)

    with pytest.raises((InvalidWork, UnsupportedWork), match=message) as failure:
        run(checkpoints, replace(work, inputs=inputs))

    assert failure.value.input_index == (1 if "length" in message or "parts" in message else None)


def test_parts_pass_the_wire_unchanged() -> None:
    work = EmbedParts((("a text",), parts()[0], (Audio(b"\0\xff", "audio/wav", 1.5),)), dimensions=4)

    request = wire.request_decoder.decode(wire.encoder.encode(wire.Request(work, 1.0)))

    assert request.work == work


def test_inspection_without_weights_agrees_with_the_load(checkpoints: Checkpoints) -> None:
    folder = checkpoints.folder("siglip")
    boot = wire.ModelBoot("tiny", str(folder), dtype="float32", device="cpu")

    found = inspect_folder(boot, folder)

    assert (found.refusal, found.kind, found.packed) == (None, "dual", False)
    assert found.capabilities is not None
    assert Operation.EMBED_IMAGE in found.capabilities.operations
    assert estimate_bytes(boot, folder) == found.weights.memory_bytes


def _without_picture_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "vision_model.post_layernorm" not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def _change_json(folder: Path, name: str, **values: object) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("name", "change", "options", "message"),
    [
        ("clip", _without_picture_weights, {}, "missing: vision_model.post_layernorm"),
        ("clip", lambda f: (f / "preprocessor_config.json").unlink(), {}, "no preprocessor_config.json"),
        (
            "clip",
            lambda f: _change_json(f, "preprocessor_config.json", image_processor_type="OwnProcessor"),
            {},
            "image processor of .* could not be read",
        ),
        (
            "clip",
            lambda f: _change_json(f, "preprocessor_config.json", crop_size={"height": 40, "width": 40}),
            {},
            "first passes .* failed",
        ),
        ("clip", lambda _: None, {"dtype": "int8"}, "int8"),
        ("clip", lambda _: None, {"compiled": True}, "`compile` does not serve"),
        ("clip", lambda _: None, {"settings": TaskSettings(pooling="mean")}, "leave out `pooling`"),
        ("clip", lambda _: None, {"settings": TaskSettings(task="rerank")}, "is no reranker"),
        (
            "siglip",
            lambda f: _change_json(f, "tokenizer_config.json", padding_side="left"),
            {},
            "pads the texts .* on the right",
        ),
    ],
)
def test_checkpoints_that_would_be_served_wrongly_are_refused(
    name: str,
    change: object,
    options: dict[str, object],
    message: str,
    checkpoints: Checkpoints,
    tmp_path: Path,
) -> None:
    folder = checkpoints.copy(name, tmp_path / name)
    change(folder)  # type: ignore[operator]
    choices = {"dtype": "float32", "device": "cpu", **options}

    with pytest.raises(ModelUnavailable, match=message):
        load(folder, "tiny", LoadOptions(**choices))  # type: ignore[arg-type]


def test_texts_of_siglip_have_no_punctuation(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoints.copy("siglip", tmp_path / "siglip")
    _change_json(folder, "tokenizer_config.json", tokenizer_class="SiglipTokenizer", do_lower_case=True)
    engine = engine_on(load_tiny(folder))
    texts = ("  A  photo, of\ta (big) Cat!", "a photo of a big cat")

    reply = asyncio.run(run_work(engine, Embed(texts), EmbedReply))

    np.testing.assert_array_equal(reply.vectors[0], reply.vectors[1])
    assert read_recipe(folder, TaskSettings()).padding is not None


@pytest.mark.parametrize(
    ("modules", "files", "message"),
    [
        (["CLIPModel", "Dense"], {}, "has Dense next to the module CLIPModel"),
        (["CLIPModel"], {"config_sentence_transformers.json": {"prompts": {"query": "q: "}}}, "has prompts"),
    ],
)
def test_a_module_of_clip_with_more_behind_it_is_refused(
    modules: list[str], files: dict[str, object], message: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    checkpoints.copy("clip", tmp_path / "0_CLIPModel")
    listed = [{"idx": i, "path": f"{i}_{kind}", "type": f"x.{kind}"} for i, kind in enumerate(modules)]
    for name, content in {"modules.json": listed, **files}.items():
        (tmp_path / name).write_text(json.dumps(content))

    with pytest.raises(ModelUnavailable, match=message):
        load(tmp_path, "tiny", LoadOptions("float32", "cpu"))


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [(b"{", "is not a vocabulary"), (b'{"a": 0}', r"has no token <\|startoftext\|>")],
)
def test_a_vocabulary_that_is_not_clips_is_refused(
    vocabulary: bytes, message: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = checkpoints.copy("clip", tmp_path / "clip")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink()
    (folder / "vocab.json").write_bytes(vocabulary)
    (folder / "merges.txt").write_text("#version: 0.2\n")

    with pytest.raises(ModelUnavailable, match=message):
        load(folder, "tiny", LoadOptions("float32", "cpu"))


@pytest.fixture(scope="module")
def sentence_clip(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a CLIP as sentence-transformers writes it."""
    folder = tmp_path_factory.mktemp("sentence-clip")
    SentenceTransformer(str(checkpoints.folder("clip")), device="cpu").save(
        str(folder), create_model_card=False
    )
    return folder


def test_a_clip_written_by_sentence_transformers_has_the_same_vectors(
    sentence_clip: Path, checkpoints: Checkpoints
) -> None:
    engine = engine_on(load_tiny(sentence_clip))
    work = EmbedParts(((TEXTS[0],), *parts()[:2]))

    found = asyncio.run(run_work(engine, work, EmbedReply)).vectors

    np.testing.assert_allclose(found, run(checkpoints, work).vectors, atol=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"own_key": 1}, "the key `own_key`"),
        ({"processing_kwargs": {"image": {"do_resize": False}}}, "`processing_kwargs.image`"),
        ({"modality_config": {"text": {"method": "forward"}}}, "`modality_config.text`"),
    ],
)
def test_settings_that_change_how_inputs_are_read_are_refused(
    values: dict[str, object], message: str, sentence_clip: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sentence_clip, tmp_path / "clip"))
    _change_json(folder, "sentence_bert_config.json", **values)

    with pytest.raises(ModelUnavailable, match=message):
        load(folder, "tiny", LoadOptions("float32", "cpu"))
