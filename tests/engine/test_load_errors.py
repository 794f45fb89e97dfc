"""Errors while a model is opened, which an inspection without its weights foresees."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers.sentence_transformer import modules
from transformers import AutoModelForMaskedLM

from backends.contract.errors import ModelUnavailable
from backends.torch import wire
from backends.torch.load.inspection import inspect_folder
from backends.torch.load.loader import load, options_of, require_device
from backends.torch.refusals import describe_error, refuse_on_error
from tests.engine.checkpoints import (
    DECODER,
    ENCODERS,
    SMALL,
    make_classifier,
    make_encoder,
    make_language_model,
    make_sentence_model,
)
from tests.engine.engines import load_tiny


def test_an_unexpected_error_carries_its_first_line() -> None:
    with (
        pytest.raises(ModelUnavailable, match=r"it failed: ValueError: give one of two; fetch it again$"),
        refuse_on_error("it failed", "fetch it again"),
    ):
        raise ValueError("\ngive one of two\nTraceback")


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0"])
def test_a_processor_is_always_present(device: str | None) -> None:
    require_device(device)


def test_a_device_that_is_missing_is_named_with_those_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_device("cuda")
    require_device("cuda:1")
    with pytest.raises(ModelUnavailable, match=r"no device 'cuda:2' .* only cuda, cuda:0, cuda:1, cpu;"):
        require_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelUnavailable, match=r"no device 'cuda:0' .* only cpu"):
        require_device("cuda:0")


def test_an_error_without_a_message_is_described_by_its_type() -> None:
    assert describe_error(ValueError()) == "ValueError"


def test_exhausted_memory_and_refusals_pass_unchanged() -> None:
    for error in (MemoryError(), torch.OutOfMemoryError("full"), ModelUnavailable("no such folder")):
        with pytest.raises(type(error)) as raised, refuse_on_error("it failed"):
            raise error
        assert raised.value is error


def test_a_first_pass_that_fails_is_a_refusal(
    minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_encoder(ENCODERS["bert"][0](), minilm, tmp_path)

    def fail(*_: object) -> None:
        raise IndexError("index out of range in self")

    monkeypatch.setattr("backends.torch.networks.heads.Encoder.run", fail)

    with pytest.raises(ModelUnavailable, match=r"first passes .* failed: IndexError: index out of range"):
        load_tiny(folder)


def test_weights_that_overflow_in_the_number_format_are_refused(minilm: Path, tmp_path: Path) -> None:
    config = ENCODERS["modernbert"][0]()
    config.initializer_range = 2e4
    folder = make_encoder(config, minilm, tmp_path)

    load_tiny(folder, "float32")
    with pytest.raises(ModelUnavailable, match="results are not finite numbers"):
        load_tiny(folder, "float16")


XGLM = {"vocab_size": 30522, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}
XGLM |= {"max_position_embeddings": 130}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
}
FSMT = transformers.FSMTConfig(
    langs=["en", "de"],
    src_vocab_size=30522,
    tgt_vocab_size=30522,
    d_model=32,
    max_position_embeddings=130,
    encoder_layers=2,
    decoder_layers=2,
)
Made: TypeAlias = Callable[[Path, Path], Path]
HALVES = {"vocab_size": 30522, "d_model": 32, "eos_token_id": 102, "pad_token_id": 0}
BART = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
GPT2 = {"vocab_size": 30522, "n_positions": 130, "n_embd": 32, "n_layer": 2, "n_head": 4}
BART |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 130}


def with_activation(name: str | None) -> Made:
    def make(minilm: Path, folder: Path) -> Path:
        encoder = make_encoder(ENCODERS["bert"][0](), minilm, folder / "encoder")
        make_sentence_model(encoder, folder / "model", "mean", [modules.Dense(32, 16)])
        edit_config(folder / "model" / "2_Dense", activation_function=name)
        return folder / "model"

    return make


def with_dense_of(width: int) -> Made:
    def make(minilm: Path, folder: Path) -> Path:
        encoder = make_encoder(ENCODERS["bert"][0](), minilm, folder / "encoder")
        make_sentence_model(encoder, folder / "model", "mean", [modules.Dense(width, 16)])
        return folder / "model"

    return make


def classifier(config: transformers.PretrainedConfig, labels: int = 3) -> Made:
    return lambda minilm, folder: with_limit(make_classifier(config, minilm, folder, labels))


def masked(config: transformers.PretrainedConfig) -> Made:
    return lambda minilm, folder: with_limit(
        make_language_model(config, minilm, folder, AutoModelForMaskedLM)
    )


def encoder_with(config: transformers.PretrainedConfig, **keys: Any) -> Made:
    def make(minilm: Path, folder: Path) -> Path:
        edit_config(with_limit(make_encoder(config, minilm, folder)), **keys)
        return folder

    return make


def with_rotation(kind: str) -> Made:
    """Return the maker of a decoder whose rotary positions are of a kind."""

    def make(minilm: Path, folder: Path) -> Path:
        with_limit(make_encoder(transformers.LlamaConfig(**DECODER), minilm, folder))
        edit_config(folder, rope_scaling={"type": kind, "factor": 2.0})
        return folder

    return make


def adapter_alone(_: Path, folder: Path) -> Path:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "acme/base"}')
    return folder


def checkpoint_inside(minilm: Path, folder: Path) -> Path:
    make_encoder(BERT(), minilm, folder / "checkpoint-500")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder


def git_pointer(minilm: Path, folder: Path) -> Path:
    make_encoder(BERT(), minilm, folder)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 90\n"
    (folder / "model.safetensors").write_text(pointer)
    return folder


def splade(minilm: Path, folder: Path) -> Path:
    make_language_model(BERT(), minilm, folder, AutoModelForMaskedLM)
    listed = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.sparse_encoder.MLMTransformer"}
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    return with_limit(folder)


def in_float8(minilm: Path, folder: Path) -> Path:
    path = make_encoder(ENCODERS["bert"][0](), minilm, folder) / "model.safetensors"
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    return folder


def edit_config(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def with_limit(folder: Path) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 128}))
    return folder


BERT = ENCODERS["bert"][0]
# A made checkpoint, its `pooling`, and its refusal; None for one that is served.
VERDICTS: dict[str, tuple[Made, str | None, str | None]] = {
    "dense-null": (with_activation(None), None, "asks for the activation None"),
    "dense-newgelu": (with_activation("transformers.activations.NewGELUActivation"), None, "NewGELU"),
    "dense-glu": (with_activation("torch.nn.modules.activation.GLU"), None, "activation.GLU"),
    "dense-plain-name": (with_activation("torch.nn.ReLU6"), None, None),
    "dense-without-weight": (with_activation("torch.nn.PReLU"), None, "Missing key"),
    "dense-of-another-width": (with_dense_of(24), None, "cannot be multiplied"),
    "classifier-without-padding": (
        classifier(transformers.GPT2Config(**GPT2)),
        None,
        "no padding token",
    ),
    "classifier-of-qwen": (classifier(transformers.Qwen3Config(**DECODER, head_dim=8)), None, None),
    "classifier-of-t5": (
        classifier(transformers.T5Config(**HALVES, d_kv=8, d_ff=48, num_layers=2, num_heads=4)),
        None,
        "'t5', an encoder-decoder, whose classifier",
    ),
    "classifier-of-bart": (
        classifier(transformers.BartConfig(**HALVES, **BART)),
        None,
        "'bart', an encoder-decoder, whose classifier",
    ),
    "marian": (
        encoder_with(transformers.MarianConfig(**HALVES, **BART, decoder_start_token_id=0)),
        None,
        "'marian', an encoder-decoder, of which",
    ),
    "markuplm": (
        encoder_with(transformers.MarkupLMConfig(**SMALL)),
        None,
        "'markuplm', whose network reads the place of each word in a page's markup",
    ),
    "layoutlm": (
        encoder_with(transformers.LayoutLMConfig(**SMALL)),
        None,
        "the place of each word on a page",
    ),
    "codegen": (encoder_with(transformers.CodeGenConfig(**GPT2, rotary_dim=4)), None, None),
    "rwkv": (
        encoder_with(transformers.RwkvConfig(vocab_size=30522, hidden_size=32, num_hidden_layers=2)),
        None,
        None,
    ),
    "masked-bart": (masked(transformers.BartConfig(**HALVES, **BART)), "splade", None),
    "masked-longformer": (
        masked(transformers.LongformerConfig(**SMALL | {"attention_window": 8})),
        "splade",
        None,
    ),
    "masked-luke": (
        masked(transformers.LukeConfig(**SMALL | {"entity_vocab_size": 10, "entity_emb_size": 16})),
        "splade",
        None,
    ),
    "masked-mobilebert": (
        masked(transformers.MobileBertConfig(**SMALL, embedding_size=16, intra_bottleneck_size=16)),
        "splade",
        "no attribute 'weight'",
    ),
    "squeezebert": (
        encoder_with(transformers.SqueezeBertConfig(**SMALL | {"embedding_size": 32})),
        None,
        None,
    ),
    "reformer": (
        encoder_with(transformers.ReformerConfig(vocab_size=30522, axial_pos_shape=[8, 16])),
        None,
        "whose attention chooses keys at random",
    ),
    "fsmt": (encoder_with(FSMT), None, "'fsmt', an encoder-decoder, of which"),
    # Its table of positions grows in a pass, which a load then could not copy.
    "xglm": (encoder_with(transformers.XGLMConfig(**XGLM)), None, None),
    # Only a part of each head is rotated.
    "glm4_moe": (encoder_with(transformers.Glm4MoeConfig(**DECODER, **EXPERTS, head_dim=16)), None, None),
    "ntk": (
        with_rotation("ntk"),
        None,
        "rotary positions of the type 'ntk' .* have .it has: dynamic, linear",
    ),
    "yarn": (with_rotation("yarn"), None, None),
    "adapter": (adapter_alone, None, "is an adapter of acme/base: put its files into a folder"),
    "trainer-output": (checkpoint_inside, None, "no config.json; there is one in checkpoint-500"),
    "git-lfs": (git_pointer, None, "a pointer of Git LFS .* run `git lfs pull`"),
    "splade-as-dense": (splade, "mean", "`pooling: mean` does not go with; leave out `pooling`"),
    "config-in-float8": (encoder_with(BERT(), dtype="float8_e4m3fn"), None, "weights in float8_e4m3fn"),
    "config-in-int8": (encoder_with(BERT(), dtype="int8"), None, "weights in int8"),
    "files-in-float8": (in_float8, None, "as F8_E4M3"),
    "quantized": (
        encoder_with(BERT(), quantization_config={"quant_method": "gptq"}),
        None,
        "quantized weights .gptq",
    ),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_an_inspection_has_the_verdict_of_the_load(name: str, minilm: Path, tmp_path: Path) -> None:
    make, pooling, refusal = VERDICTS[name]
    folder = make(minilm, tmp_path)
    boot = wire.ModelBoot("tiny", str(folder), dtype="float32", device="cpu", pooling=pooling)

    found = inspect_folder(boot, folder)

    if refusal is None:
        loaded = load(folder, "tiny", options_of(boot))
        assert (found.refusal, found.packed) == (None, loaded.packed)
    else:
        with pytest.raises(ModelUnavailable, match=refusal) as refused:
            load(folder, "tiny", options_of(boot))
        assert refused.value.message == found.refusal


PACKAGE = "sentence_transformers"
LISTS = {
    "a router of networks in folders": (
        ["models.Router.Router"],
        "module Router of sentence-transformers with networks in the folders query_0, document_0; ",
    ),
    "an old router": (
        ["models.Asym.Asym"],
        "module Asym of sentence-transformers with networks in the folders",
    ),
    "words": (
        ["models.WordEmbeddings.WordEmbeddings", "models.Pooling.Pooling"],
        r"begins with the module WordEmbeddings of sentence-transformers \(WordEmbeddings, Pooling\)",
    ),
    "a bag of words": (["models.BoW.BoW", "models.Dense.Dense"], "begins with the module BoW"),
    "a table": (
        ["sparse_encoder.models.SparseStaticEmbedding"],
        "is a SparseStaticEmbedding, a table of token",
    ),
    "a network in a folder": (
        ["models.Transformer.Transformer", "models.Pooling.Pooling"],
        "has its network in 0_Transformer; move the files",
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_modules_without_a_network_at_the_top_are_named(name: str, tmp_path: Path) -> None:
    types, reason = LISTS[name]
    is_router = "router" in name
    listed = [
        {
            "idx": place,
            "name": str(place),
            "path": "" if is_router else f"{place}_{type_.rpartition('.')[2]}",
            "type": f"{PACKAGE}.{type_}",
        }
        for place, type_ in enumerate(types)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    network = f"{PACKAGE}.models.Transformer.Transformer"
    routes = {"query_0": network, "document_0": network, "document_1": f"{PACKAGE}.models.Pooling.Pooling"}
    config = {"types": routes, "structure": {"query": ["query_0"], "document": ["document_0", "document_1"]}}
    (tmp_path / "router_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelUnavailable, match=reason) as caught:
        load_tiny(tmp_path)
    assert "config.json" not in caught.value.message
