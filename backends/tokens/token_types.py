"""Decision whether a tokenizer gives type ids, which distinguish the two texts of a pair.

Pure. Sources: `model_input_names` of the tokenizer classes of transformers 4.57 and 5.23, and the classes
that their AutoTokenizer opens. Version 4 gave type ids except for some classes, version 5 gives them for few.
"""

from typing import Any

from backends.tokens.tokenizer_rules import Json, TokenizerFiles, TypeIds

# Classes to which version 4 gave none.
UNTYPED_IN_4 = frozenset(
    f"{name}Tokenizer"
    for name in (
        *("Bart", "Barthez", "Bartpho", "BertGeneration", "BigBird", "BioGpt", "Blenderbot", "Bloom", "ByT5"),
        *("CLIP", "Camembert", "Clvp", "CodeGen", "CodeLlama", "Cohere", "CpmAnt", "DPRReader", "Dia"),
        *("DistilBert", "Esm", "FSMT", "GPT2", "GPTNeoX", "GPTNeoXJapanese", "GPTSw3", "Gemma", "LED"),
        *("LayoutLMv3", "LayoutXLM", "Llama", "Longformer", "Luke", "M2M100", "MBart", "MBart50", "MLuke"),
        *("MPNet", "MT5", "Marian", "Mvp", "MyT5", "Nllb", "Nougat", "OpenAIGPT", "PLBart", "Pegasus"),
        *("Perceiver", "ProphetNet", "Qwen2", "Reformer", "Roberta", "SeamlessM4T", "Siglip", "T5", "Udop"),
        *("Whisper", "XGLM", "XLMRoberta"),
    )
)
# Classes to which version 5 gives them.
TYPED_IN_5 = frozenset(
    f"{name}Tokenizer"
    for name in (
        *("Bert", "Canine", "ConvBert", "DPRContextEncoder", "DPRQuestionEncoder", "Deberta", "DebertaV2"),
        *("Electra", "FNet", "LayoutLM", "LayoutLMv2", "Lxmert", "MarkupLM", "MobileBert", "SqueezeBert"),
        "Tapas",
    )
)
# Types of networks for which version 5 opens its plain class, whatever class the files name.
PLAIN_IN_5 = frozenset({"gpt_bigcode", "nystromformer", "xlm-roberta-xl"})
# Names of classes that version 4 did not have.
CLASSES_OF_5 = frozenset({"TokenizersBackend", "PythonBackend"})


def find_type_ids(files: TokenizerFiles) -> TypeIds:
    """Return whether a tokenizer gives type ids, as the library did with which its checkpoint was written.

    Where no file states the library, it was version 4 or older: later ones state their version.
    """
    stated = files.config.get("model_input_names")
    if stated is not None:
        return TypeIds(given="token_type_ids" in stated)
    name = files.class_name
    is_plain = files.model.get("model_type") in PLAIN_IN_5
    in_4, in_5 = name not in UNTYPED_IN_4, name in TYPED_IN_5 and not is_plain
    if in_4 == in_5 or name in CLASSES_OF_5:
        return TypeIds(given=in_5)
    version = files.library
    is_later = version is not None and _major(version) >= 5
    return TypeIds(given=in_5) if is_later else TypeIds(in_4, differs=True, library=version)


def written_with(model: Json, sentence: Json) -> str | None:
    """Return the version of transformers with which a checkpoint was written, None if no file states it.

    model: content of config.json. sentence: content of config_sentence_transformers.json.
    """
    versions = sentence.get("__version__")
    named = versions.get("transformers") if isinstance(versions, dict) else None
    stated: Any = model.get("transformers_version") or named
    return stated if isinstance(stated, str) and _major(stated) else None


def _major(version: str) -> int:
    first = version.split(".", 1)[0]
    return int(first) if first.isdecimal() else 0
