"""Rules of tokenization that a checkpoint states next to its tokenizer.json, and their files.

Pure data.
"""

from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

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
