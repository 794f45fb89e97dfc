"""Tests of checkpoints that need code of their own: refusals, and what trusted code computes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from backends.contract import Classify, ClassifyReply, Embed, EmbedReply, Output
from backends.contract.errors import ModelUnavailable
from backends.recipe.options import TaskSettings
from backends.torch import wire
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import describe, load, load_model, locate_model
from tests.engine.checkpoints import ENCODERS, make_encoder
from tests.engine.engines import TEXTS, cosines, encode, engine_on, load_tiny, run_work
from tests.engine.own_code import MODULE, OWN_AUTO_MAP, code_files, make_own_model, token_vectors
from tests.fakes.hub import commit_of, use_hub, write_cache

OUTSIDE_AUTO_MAP = {name: f"org/code--{reference}" for name, reference in OWN_AUTO_MAP.items()}


@pytest.fixture(autouse=True)
def modules(own_modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder into which transformers copies code; the Hub is its cache, without a network."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(own_modules))
    use_hub(monkeypatch, HF_HUB_CACHE=str(tmp_path / "cache"), HF_HUB_OFFLINE=True)
    return own_modules


def refusal(folder: Path, options: LoadOptions) -> str:
    """Return the reason that `describe` and `load` give."""
    with pytest.raises(ModelUnavailable) as described:
        describe(folder, "own", options)
    with pytest.raises(ModelUnavailable) as loaded:
        load(folder, "own", options)
    assert described.value.message == loaded.value.message
    return loaded.value.message


@pytest.mark.parametrize("returned", ["output", "tuple", "dict"])
async def test_trusted_code_computes_what_it_computes_by_hand(
    minilm: Path, tmp_path: Path, returned: str
) -> None:
    weights = make_own_model(tmp_path / "own", minilm, code=code_files(returned))
    model = load_tiny(tmp_path / "own", trust_remote_code=True)
    engine = engine_on(model)

    reply = await encode(engine, TEXTS, Output.DENSE, Output.TOKENS)

    ids = [model.preparer.tokenizer.encode([text], "right").ids[0][:64] for text in TEXTS]
    expected = [token_vectors(weights, text_ids).mean(0).numpy() for text_ids in ids]
    assert reply.dense is not None
    assert cosines(reply.dense, np.stack(expected)).min() > 0.99999
    # Unknown code may keep state, and takes no positions from outside.
    assert not model.reentrant
    assert not model.packed


async def test_trusted_code_serves_bfloat16(minilm: Path, tmp_path: Path) -> None:
    make_own_model(tmp_path, minilm)
    wide = await encode(engine_on(load_tiny(tmp_path, trust_remote_code=True)), TEXTS, Output.DENSE)
    narrow = await encode(
        engine_on(load_tiny(tmp_path, "bfloat16", trust_remote_code=True)), TEXTS, Output.DENSE
    )

    assert wide.dense is not None
    assert narrow.dense is not None
    assert cosines(wide.dense, narrow.dense).min() > 0.999


async def test_trusted_classifier_reads_its_logits(minilm: Path, tmp_path: Path) -> None:
    auto_map = {**OWN_AUTO_MAP, CLASSIFIER: f"{MODULE}.OwnModel"}
    weights = make_own_model(
        tmp_path,
        minilm,
        auto_map,
        code_files("logits"),
        architectures=["OwnForSequenceClassification"],
        id2label={"0": "score"},
    )
    model = load_tiny(tmp_path, trust_remote_code=True)

    reply = await run_work(engine_on(model), Classify((TEXTS[0],), raw_scores=True), ClassifyReply)

    ids = model.preparer.tokenizer.encode([TEXTS[0]], "right").ids[0]
    np.testing.assert_allclose(reply.scores[0][0], token_vectors(weights, ids).sum(0)[0], atol=1e-4)


def test_code_runs_only_if_it_is_trusted(minilm: Path, tmp_path: Path, modules: Path) -> None:
    code = code_files()
    # Code that another test ran is not run again.
    code[f"{MODULE}.py"] += "\nPath(__file__).with_name('ran').touch()\n"
    make_own_model(tmp_path / "own", minilm, code=code)

    reason = refusal(tmp_path / "own", LoadOptions("float32", "cpu"))

    assert "`OwnModel` of its own repository" in reason
    assert "set `trust_remote_code: true`" in reason
    assert "code_revision" not in reason
    assert not list(modules.rglob("ran"))
    load_tiny(tmp_path / "own", trust_remote_code=True)
    assert list(modules.rglob("ran"))


async def test_code_of_another_repository_comes_from_its_commit(minilm: Path, tmp_path: Path) -> None:
    weights = make_own_model(tmp_path / "files", minilm, OUTSIDE_AUTO_MAP, code={})
    cache = tmp_path / "cache"
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    checkpoint = write_cache(
        cache, "org/model", {name: (tmp_path / "files" / name).read_bytes() for name in names}
    )
    write_cache(cache, "org/code", {name: text.encode() for name, text in code_files().items()})
    options = LoadOptions("float32", "cpu")

    reason = refusal(checkpoint, options)
    assert "`OwnModel` of org/code" in reason
    assert "`trust_remote_code: true`, and `code_revision` to a commit of org/code" in reason
    assert "Set `code_revision` to the commit" in refusal(
        checkpoint, replace(options, trust_remote_code=True)
    )

    boot = wire.ModelBoot(
        "own",
        "org/model",
        dtype="float32",
        device="cpu",
        trust_remote_code=True,
        code_revision=commit_of("org/code"),
    )
    model = load_model(boot, locate_model(boot), lambda _: None, lambda warm_up: warm_up())

    reply = await run_work(engine_on(model), Embed((TEXTS[0],), normalize=False), EmbedReply)
    ids = model.preparer.tokenizer.encode([TEXTS[0]], "right").ids[0]
    np.testing.assert_allclose(reply.vectors[0], token_vectors(weights, ids).mean(0), atol=1e-4)
    with pytest.raises(ModelUnavailable, match="org/code"):
        locate_model(replace(boot, code_revision="0" * 40))


def test_code_beside_the_weights_needs_no_commit(minilm: Path, tmp_path: Path) -> None:
    make_own_model(tmp_path / "own", minilm, OUTSIDE_AUTO_MAP)

    assert "code_revision" not in refusal(tmp_path / "own", LoadOptions("float32", "cpu"))
    load_tiny(tmp_path / "own", trust_remote_code=True)


@pytest.mark.parametrize(
    ("returned", "count", "reason"),
    [
        ("sentence", "mask", r"`OwnModel` returns no `last_hidden_state` but dict"),
        ("pooled", "mask", r"`OwnModel` returns `last_hidden_state` \(2, 16\) for 2 texts"),
        ("output", "length", r"`OwnModel` gives a text other values next to a longer one"),
        ("failure", "mask", r"`OwnModel`, failed: ZeroDivisionError"),
    ],
)
def test_refuses_code_whose_output_it_cannot_serve(
    minilm: Path, tmp_path: Path, returned: str, count: str, reason: str
) -> None:
    make_own_model(tmp_path / "own", minilm, code=code_files(returned, count))

    with pytest.raises(ModelUnavailable, match=reason):
        load(tmp_path / "own", "own", LoadOptions("float32", "cpu", trust_remote_code=True))


def test_names_the_package_that_code_needs(minilm: Path, tmp_path: Path) -> None:
    code = code_files()
    code[f"{MODULE}.py"] = "import no_such_package\n" + code[f"{MODULE}.py"]
    make_own_model(tmp_path / "own", minilm, code=code)

    with pytest.raises(ModelUnavailable, match="no_such_package"):
        load(tmp_path / "own", "own", LoadOptions("float32", "cpu", trust_remote_code=True))


def test_trust_changes_nothing_for_a_network_of_transformers(minilm: Path, tmp_path: Path) -> None:
    make_encoder(ENCODERS["bert"][0](), minilm, tmp_path)
    edit(tmp_path / "config.json", auto_map={"AutoModel": "org/code--modeling_bert.BertModel"})

    assert load_tiny(tmp_path).packed
    assert load_tiny(tmp_path, trust_remote_code=True).packed


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


QWEN_CODE = {
    "AutoModel": "modeling_qwen.Qwen2Model",
    "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
}
NOMIC_CODE = {
    "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
    "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
}
NOMIC = {
    "model_type": "nomic_bert",
    "activation_function": "swiglu",
    "rotary_emb_fraction": 1.0,
    "rotary_emb_base": 1000,
    "n_head": 12,
    "n_embd": 768,
    "n_layer": 12,
    "n_inner": 3072,
    "n_positions": 64,
}
CLASSIFIER = "AutoModelForSequenceClassification"
JINA = "jinaai/xlm-roberta-flash-implementation--"
# Entries of published config.json files, and a part of the refusal; "" for a network that transformers has.
PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    "jina-embeddings-v2": (
        {
            "model_type": "bert",
            "auto_map": {
                "AutoConfig": "jinaai/jina-bert-implementation--configuration_bert.JinaBertConfig",
                "AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel",
            },
        },
        "`JinaBertModel` of jinaai/jina-bert-implementation",
    ),
    "jina-embeddings-v3": (
        {
            "model_type": "xlm-roberta",
            "auto_map": {
                "AutoConfig": f"{JINA}configuration_xlm_roberta.XLMRobertaFlashConfig",
                "AutoModel": f"{JINA}modeling_lora.XLMRobertaLoRA",
            },
        },
        "",
    ),
    "jina-colbert-v2": (
        {
            "model_type": "xlm-roberta",
            "architectures": ["HF_ColBERT"],
            "auto_map": {
                "AutoConfig": f"{JINA}configuration_xlm_roberta.XLMRobertaFlashConfig",
                "AutoModel": f"{JINA}modeling_xlm_roberta.XLMRobertaModel",
            },
        },
        "transformers has the `XLMRobertaConfig`",
    ),
    "jina-reranker-v2": (
        {
            "model_type": "xlm-roberta",
            "architectures": ["XLMRobertaForSequenceClassification"],
            "auto_map": {
                "AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig",
                CLASSIFIER: "modeling_xlm_roberta.XLMRobertaForSequenceClassification",
            },
        },
        "`XLMRobertaForSequenceClassification` of its own repository",
    ),
    "gte-v1.5": (
        {
            "model_type": "new",
            "auto_map": {
                "AutoConfig": "Alibaba-NLP/new-impl--configuration.NewConfig",
                "AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel",
            },
        },
        "transformers has no such class for `model_type` 'new'",
    ),
    "NV-Embed-v2": (
        {
            "model_type": "nvembed",
            "auto_map": {
                "AutoConfig": "configuration_nvembed.NVEmbedConfig",
                "AutoModel": "modeling_nvembed.NVEmbedModel",
            },
        },
        "`NVEmbedModel`",
    ),
    "nomic-embed-text-v1.5": (NOMIC | {"auto_map": NOMIC_CODE}, ""),
    "nomic-embed-text-v2-moe": (
        NOMIC
        | {
            "auto_map": NOMIC_CODE,
            "activation_function": "gelu",
            "rotary_emb_base": 10000,
            "num_experts": 8,
        },
        "does not implement `rotary_emb_base: 10000`, `num_experts: 8`, `activation_function: gelu`",
    ),
    "nomic without code, which scales positions": (
        {"model_type": "nomic_bert", "rotary_scaling_factor": 2.0, "rotary_emb_base": 1000},
        "states `rotary_scaling_factor: 2.0` in config.json, which transformers' NomicBert does not read",
    ),
    "nomic without code": ({"model_type": "nomic_bert", "rotary_scaling_factor": None}, ""),
    "nomic of another size": (NOMIC | {"auto_map": NOMIC_CODE, "n_head": 16}, "`n_head: 16`"),
    "gte-Qwen2": ({"model_type": "qwen2", "is_causal": False, "auto_map": QWEN_CODE}, ""),
    "qwen2 of unknown direction": (
        {"model_type": "qwen2", "auto_map": QWEN_CODE},
        "it may attend in both directions",
    ),
    "plain bert": ({"model_type": "bert"}, ""),
    "EuroBERT": (
        {
            "model_type": "eurobert",
            "auto_map": {
                "AutoConfig": "configuration_eurobert.EuroBertConfig",
                "AutoModel": "modeling_eurobert.EuroBertModel",
            },
        },
        "",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_auto_maps(minilm: Path, tmp_path: Path, name: str) -> None:
    config, reason = PUBLISHED[name]
    make_own_model(tmp_path, minilm, {}, {})
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64} | config))
    options = LoadOptions("float32", "cpu")

    if reason:
        assert reason in refusal(tmp_path, options)
    else:
        describe(tmp_path, name, options)


@pytest.mark.parametrize("entry", ["own.py.Own", "../own.Own", "org/code--a.b.C", "own", 3])
def test_refuses_references_that_name_no_class(minilm: Path, tmp_path: Path, entry: object) -> None:
    make_own_model(tmp_path, minilm)
    edit(tmp_path / "config.json", auto_map={"AutoModel": entry})

    with pytest.raises(ModelUnavailable, match="`auto_map` names no class for AutoModel"):
        describe(tmp_path, "own", LoadOptions("float32", "cpu", trust_remote_code=True))


def test_refuses_code_of_two_repositories(minilm: Path, tmp_path: Path) -> None:
    make_own_model(tmp_path, minilm, {**OUTSIDE_AUTO_MAP, "AutoModel": "org/other--m.OwnModel"}, code={})
    options = LoadOptions("float32", "cpu", trust_remote_code=True, code_revision="0" * 40)

    assert "several repositories (org/code, org/other)" in refusal(tmp_path, options)


@pytest.mark.parametrize("trusted", [False, True])
def test_refuses_modules_of_unknown_code(minilm: Path, tmp_path: Path, *, trusted: bool) -> None:
    make_encoder(ENCODERS["bert"][0](), minilm, tmp_path)
    module = {"idx": 0, "name": "0", "path": "", "type": "custom_st.Transformer"}
    (tmp_path / "modules.json").write_text(json.dumps([module]))

    reason = refusal(tmp_path, LoadOptions("float32", "cpu", trust_remote_code=trusted))

    assert "names the module custom_st.Transformer" in reason


@pytest.mark.parametrize(
    ("classes", "is_refused"),
    [
        (["tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"], False),
        ([None, "tokenization_own.OwnTokenizerFast"], True),
        (["org/code--tokenization_own.OwnTokenizer", None], True),
    ],
)
def test_refuses_tokenizers_of_unknown_code(
    minilm: Path, tmp_path: Path, classes: list[str | None], *, is_refused: bool
) -> None:
    make_encoder(ENCODERS["bert"][0](), minilm, tmp_path)
    edit(tmp_path / "tokenizer_config.json", auto_map={"AutoTokenizer": classes})
    options = LoadOptions("float32", "cpu", trust_remote_code=True)

    if is_refused:
        assert "tokenizer of its own, `OwnTokenizer" in refusal(tmp_path, options)
    else:
        describe(tmp_path, "own", options)


def test_runs_no_code_for_sparse_models(minilm: Path, tmp_path: Path) -> None:
    make_own_model(tmp_path, minilm, {**OWN_AUTO_MAP, "AutoModelForMaskedLM": f"{MODULE}.OwnModel"})
    settings = TaskSettings(pooling="splade")
    options = LoadOptions("float32", "cpu", trust_remote_code=True, settings=settings)

    assert "runs no such code for models of kind sparse" in refusal(tmp_path, options)
