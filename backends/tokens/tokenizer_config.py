"""Rules of tokenization in the small files next to tokenizer.json, among them the type ids of a pair's texts.

Pure: knows neither the tokenizers package nor torch.
Sources: the tokenizer classes of transformers 4.57, with which published checkpoints were made. They applied
these keys of tokenizer_config.json to the tokenizer of tokenizer.json; transformers 5 drops `add_bos_token`
and `add_eos_token`. The code of gte-Qwen2's tokenizer as text-embeddings-inference 1.9 and vLLM replace it.
`model_input_names` of the tokenizer classes of transformers 4.57 and 5.23, and the classes that their
AutoTokenizer opens: version 4 gave type ids except for some classes, version 5 gives them for few.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from backends.contract import TokenizerSettings
from backends.contract.errors import ModelUnavailable

Json = dict[str, Any]
EndKey: TypeAlias = Literal["add_bos_token", "add_eos_token"]
ENDS: tuple[EndKey, EndKey] = ("add_bos_token", "add_eos_token")
Origin: TypeAlias = Literal["settings", "config", "code"]

# Class of a checkpoint that names none, by `model_type` of config.json.
CLASSES_OF_TYPES = {
    **dict.fromkeys(("bert", "convbert", "electra", "mobilebert", "nomic_bert"), "BertTokenizer"),
    **dict.fromkeys(("llama", "mistral", "mixtral"), "LlamaTokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("data2vec-text", "ibert", "roberta", "roberta-prelayernorm"), "RobertaTokenizer"),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "opt"), "GPT2Tokenizer"),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl", "xmod"), "XLMRobertaTokenizer"),
    "bart": "BartTokenizer",
    "big_bird": "BigBirdTokenizer",
    "camembert": "CamembertTokenizer",
    "clip": "CLIPTokenizer",
    "codegen": "CodeGenTokenizer",
    "deberta": "DebertaTokenizer",
    "distilbert": "DistilBertTokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "longformer": "LongformerTokenizer",
    "luke": "LukeTokenizer",
    "mpnet": "MPNetTokenizer",
    "openai-gpt": "OpenAIGPTTokenizer",
    "siglip": "SiglipTokenizer",
}


class AddedWord(msgspec.Struct, frozen=True):
    """Token that is found in a text before the text is split; id: None if the files do not state it."""

    content: str
    id: int | None = None
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class EndRule(msgspec.Struct, frozen=True):
    """One side of a text: the token to add, or to leave out.

    origin: source of the rule: a setting of the upstream, a key that the tokenizer's class followed, or code
    that is not run.
    """

    key: EndKey
    token: str | None
    add: bool
    origin: Origin


class LetterRules(msgspec.Struct, frozen=True):
    """Treatment of letters by BERT's normalizer, under the names of tokenizer.json."""

    lowercase: bool = True
    strip_accents: bool | None = None
    handle_chinese_chars: bool = True


class TypeIds(msgspec.Struct, frozen=True):
    """Presence of ids that distinguish the two texts of a pair.

    differs: True if transformers 5 gives none. library: the version of transformers that the checkpoint was
    written with, None if no file states it.
    """

    given: bool = True
    differs: bool = False
    library: str | None = None


class TokenizerRules(msgspec.Struct, frozen=True):
    """Changes that a checkpoint's files and the operator ask of its tokenizer.json; None changes nothing.

    prefix_space: a space before the first word. vocabulary_size: of the network. code: class of tokenizer
    code that is not run. special: False if no tokens are put around a text, whatever tokenizer.json says.
    lower_case: letters between special tokens are lowered first. without_punctuation: punctuation is removed
    then, and spaces are merged. splits_special: special tokens in a text are
    split as other words are. truncation_side: end that is cut where a request names none.
    """

    bos: EndRule | None = None
    eos: EndRule | None = None
    letters: LetterRules | None = None
    prefix_space: bool | None = None
    added: tuple[AddedWord, ...] = ()
    vocabulary_size: int | None = None
    code: str | None = None
    special: bool = True
    lower_case: bool = False
    without_punctuation: bool = False
    splits_special: bool = False
    type_ids: TypeIds = TypeIds()
    truncation_side: Literal["left", "right"] | None = None


class TokenizerFiles(NamedTuple):
    """Small files with the settings of a checkpoint's tokenizer.

    network: settings of sentence-transformers for the network itself. library: version of transformers with
    which the checkpoint was written, None if no file states it.
    """

    config: Json
    model: Json
    named: Json
    added: Json
    network: Json
    library: str | None = None

    @property
    def class_name(self) -> str:
        """Class of the tokenizer, without `Fast`; empty if no file states it."""
        stated = self.config.get("tokenizer_class") or self.model.get("tokenizer_class")
        name = stated or CLASSES_OF_TYPES.get(str(self.model.get("model_type")), "")
        return str(name).removesuffix("Fast")

    def token(self, key: str, default: str) -> str | None:
        """Return the text of a named token such as `eos_token`."""
        value = self.named.get(key, default)
        return str(value["content"]) if isinstance(value, dict) else value


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


# Classes that rebuilt the tokens around a text from the two keys, with the defaults of their tokens.
LLAMA_ENDS = ("<s>", "</s>")
GEMMA_ENDS = ("<bos>", "<eos>")
COHERE_ENDS = ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>")
NEOX_ENDS = ("<|endoftext|>", "<|endoftext|>")
REBUILDING_CLASSES = {
    "LlamaTokenizer": LLAMA_ENDS,
    "CodeLlamaTokenizer": LLAMA_ENDS,
    "GemmaTokenizer": GEMMA_ENDS,
    "CohereTokenizer": COHERE_ENDS,
    "GPTNeoXTokenizer": NEOX_ENDS,
}
# Classes that took case, accents and Chinese characters from tokenizer_config.json, defaults included.
WORDPIECE_CLASSES = frozenset(
    f"{name}Tokenizer"
    for name in (
        "Bert",
        "ConvBert",
        "DistilBert",
        "Electra",
        "Funnel",
        "LayoutLM",
        "Lxmert",
        "MPNet",
        "MobileBert",
        "Realm",
        "RetriBert",
        "Splinter",
        "SqueezeBert",
    )
)
# Classes that took `add_prefix_space` from tokenizer_config.json, false by default.
PREFIX_CLASSES = frozenset(
    f"{name}Tokenizer"
    for name in ("Bart", "Blenderbot", "Deberta", "GPT2", "LED", "Longformer", "Mvp", "Roberta")
)
# Code of gte-Qwen2's and stella_en_1.5B's tokenizer, which puts an end token behind each text.
QWEN_CODE = ("tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast")
QWEN_END = "<|endoftext|>"
SIGLIP_CLASS, SIGLIP2_CLASS = "SiglipTokenizer", "Siglip2Tokenizer"
# Types whose texts were lowered in training; their checkpoints name the class of another tokenizer.
LOWERED_TYPES = frozenset({"siglip2"})
SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def rules_of(files: TokenizerFiles, settings: TokenizerSettings) -> TokenizerRules:
    """Return the changes that files and settings require of a tokenizer. Raises: ModelUnavailable."""
    name, code = files.class_name, _code(files.config)
    return TokenizerRules(
        bos=_end_rule(files, "add_bos_token", settings),
        eos=_end_rule(files, "add_eos_token", settings),
        letters=_letters(files) if name in WORDPIECE_CLASSES else None,
        prefix_space=_prefix_space(files),
        added=tuple(_added_words(files)),
        vocabulary_size=files.model.get("vocab_size"),
        code=code[-1] if code else None,
        lower_case=bool(files.network.get("do_lower_case")) or _lowers_letters(files),
        without_punctuation=name == SIGLIP_CLASS,
        splits_special=bool(files.config.get("split_special_tokens")),
        truncation_side=_truncation_side(files),
    )


def _lowers_letters(files: TokenizerFiles) -> bool:
    """Return True for the classes whose code lowers letters, whatever tokenizer.json says."""
    if files.class_name == SIGLIP_CLASS:
        return bool(files.config.get("do_lower_case", True))
    return files.class_name == SIGLIP2_CLASS or files.model.get("model_type") in LOWERED_TYPES


def _end_rule(files: TokenizerFiles, key: EndKey, settings: TokenizerSettings) -> EndRule | None:
    """Return the rule for one side of a text; a setting takes precedence over the files."""
    side, stated, configured = ENDS.index(key), files.config.get(key), getattr(settings, key)
    origin: Origin
    add: bool | None
    if key == "add_eos_token" and set(_code(files.config)) & set(QWEN_CODE):
        origin, default, add = "code", QWEN_END, stated is None or bool(stated)
    elif files.class_name in REBUILDING_CLASSES:
        origin, default, add = "config", REBUILDING_CLASSES[files.class_name][side], stated
    else:
        origin, default, add = "settings", "", None
    token = files.token(key.removeprefix("add_"), default) or None
    if configured is not None:
        return EndRule(key, token, configured, "settings")
    return None if add is None else EndRule(key, token, add, origin)


def _code(config: Json) -> tuple[str, ...]:
    """Return the classes of a tokenizer's own code, without their repository."""
    mapped = config.get("auto_map") or {}
    classes = mapped.get("AutoTokenizer") if isinstance(mapped, dict) else mapped
    listed = [classes] if isinstance(classes, str) else classes or []
    return tuple(str(name).rsplit("--", 1)[-1] for name in listed if name)


def _truncation_side(files: TokenizerFiles) -> Literal["left", "right"] | None:
    stated: Literal["left", "right"] | None = files.config.get("truncation_side")
    if stated in {None, "left", "right"}:
        return stated
    raise ModelUnavailable(f"`truncation_side` is {stated!r} in tokenizer_config.json; it is left or right")


def _letters(files: TokenizerFiles) -> LetterRules:
    config = files.config
    return LetterRules(
        bool(config.get("do_lower_case", True)),
        config.get("strip_accents"),
        bool(config.get("tokenize_chinese_chars", True)),
    )


def _prefix_space(files: TokenizerFiles) -> bool | None:
    stated = files.config.get("add_prefix_space")
    if files.class_name in PREFIX_CLASSES:
        return bool(stated)
    # Llama's class converted the tokenizer from scratch where the key was stated.
    return False if files.class_name == "LlamaTokenizer" and stated is False else None


def _added_words(files: TokenizerFiles) -> Iterator[AddedWord]:
    """Yield the words that only the small files list; ids are unique."""
    special = {word.content for word in _named_words(files)}
    for id_, word in files.config.get("added_tokens_decoder", {}).items():
        yield _word(word, int(id_))
    for content, id_ in files.added.items():
        is_special = content in special
        yield AddedWord(content, int(id_), normalized=not is_special, special=is_special)
    yield from _named_words(files)


def _named_words(files: TokenizerFiles) -> Iterator[AddedWord]:
    named = files.named
    extra = named.get("additional_special_tokens") or named.get("extra_special_tokens") or ()
    values: Iterable[Any] = extra.values() if isinstance(extra, dict) else extra
    for value in (*(named.get(name) for name in SPECIAL_NAMES), *values):
        if isinstance(value, dict):
            yield msgspec.structs.replace(_word(value, None), special=True)
        elif value:
            yield AddedWord(str(value), normalized=False, special=True)


def _word(word: Json, id_: int | None) -> AddedWord:
    flags = {name: bool(word[name]) for name in AddedWord.__struct_fields__[2:] if name in word}
    return AddedWord(str(word["content"]), id_, **flags)
