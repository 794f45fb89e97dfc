"""Meanings of the fields that several dialects share, and sentences of which others consist.

A field has one meaning in all dialects, with few exceptions, which each dialect adds. The structs carry the
types and bounds.
"""

from typing import Final

REFUSED: Final = "Refused with 4xx unless it is null: the gateway embeds texts only."
UNSUPPORTED: Final = "Refused with 400 unless it has its default, because the gateway does not apply it."
CUT: Final = "Whether an input longer than the model takes is cut. By default the model's config decides."
SIDE: Final = "End at which an input that is too long is cut; `NONE` refuses it instead."
BULK: Final = "0, the default, is interactive; any other value is bulk."
NO_CHAT: Final = "Refused unless it is null: this operation reads texts only."
ONLY_INSTRUCTION: Final = "May contain `instruction` only, which then takes precedence over the field."
NORMALIZE: Final = "Refused if false: send `use_activation`."
PACKED: Final = (
    "`base64` packs each vector into one string. `bytes` returns all of them as bytes, which the header "
    "`metadata` describes; `bytes_only` omits it."
)
# Of the examples.
QUERY: Final = "what is a panda?"
TEXTS: Final = ["the panda eats bamboo", "Paris is in France"]

MEANINGS: Final[dict[str, str]] = {
    "activation": "Older name of `use_activation`.",
    "add_generation_prompt": "Whether the text of a conversation ends with the start of an answer.",
    "add_special_tokens": (
        "Whether the tokenizer adds its special tokens: true by default for texts, false for `messages`."
    ),
    "cache_salt": "Changes nothing.",
    "chat_template": (
        "Template of the request for `messages`: a vLLM upstream decides on it, and any other refuses it."
    ),
    "chat_template_kwargs": (
        "Variables of the chat template for `messages`. Without these it may contain `instruction` only, "
        "which then takes precedence over the field."
    ),
    "continue_final_message": "Whether the text of a conversation ends with its last message, still open.",
    "dimensions": "Width to which vectors are cut. By default the model's own width.",
    "documents": "Texts to score against the query. The gateway's config bounds their number.",
    "embed_dtype": "Number format of packed vectors.",
    "endianness": "Byte order of packed vectors; `native` is little-endian.",
    "input": "One text or a list of texts. The gateway's config bounds their number.",
    "input_type": "Purpose of the inputs, which selects the prompt put before each of them.",
    "instruction": "The task in words, for a model that takes one.",
    "max_tokens_per_doc": "Number of tokens to which a document is cut; 0 is no bound.",
    "max_tokens_per_query": "Number of tokens to which a query is cut; 0 is no bound.",
    "media_io_kwargs": UNSUPPORTED,
    "messages": (
        "A conversation, or a list of conversations, instead of `input`. The model's chat template turns "
        "each into one text."
    ),
    "mm_processor_kwargs": UNSUPPORTED,
    "modality": "Kind of the inputs: `text`, and `image` or `audio` in the dialect of Infinity.",
    "model": "Public name of the model. It may be left out if the config has a default or the path has it.",
    "output_dimension": "Width to which vectors are cut. By default the model's own width.",
    "output_dtype": "Number format of the vectors.",
    "padding": UNSUPPORTED,
    "priority": "0 is interactive; another value is refused.",
    "prompt": "One text.",
    "query": "Text against which the others are scored.",
    "raw_scores": "Whether scores are returned as logits, without sigmoid or softmax.",
    "request_id": "Name of the request, which becomes the id of the reply.",
    "return_documents": "Whether each result contains the text of its document.",
    "return_text": "Whether each result contains its text.",
    "softmax": "Older name of `use_activation`.",
    "texts": "Texts of the request. The gateway's config bounds their number.",
    "top_n": "Number of results to return, the best first. By default all of them.",
    "truncate": CUT,
    "truncate_prompt_tokens": "Number of tokens to which an input is cut, from 1; -1 is the model's length.",
    "truncation": CUT,
    "truncation_direction": (
        "End at which an input that is too long is cut. `Left` and `Right` are accepted too."
    ),
    "truncation_side": "End at which an input that is too long is cut.",
    "use_activation": (
        "Whether the last activation is applied. False returns logits as scores, and raw vectors."
    ),
    "user": "Name of the end user. It changes nothing.",
    # Of objects inside bodies.
    "ChatMessage.role": "Who says it: `user`, `system`, `assistant`, or another role of the chat template.",
    "ChatMessage.content": "A text, or parts with a text each.",
    "ChatMessage.name": "Name of the one who says it, for templates that read it.",
    "Content.content": "Parts: one text, or texts and images where the path takes them.",
    "ContentPart.type": (
        "`text`; `image_url`, `audio_url` or `input_audio` where the path takes them; others are refused."
    ),
    "ContentPart.text": "The text of the part.",
    "ContentPart.image_url": "The image as a `data:` URI, or an object with it as `url`.",
    "ContentPart.audio_url": "The recording as a `data:` URI, or an object with it as `url`.",
    "ContentPart.input_audio": "The recording in base64, as `data` of an object.",
    "InputAudio.data": "The recording in base64.",
    "InputAudio.format": "Changes nothing: the content decides it.",
    "MediaAddress.url": "`data:` URI, or an address that `media.fetch` allows.",
    "MediaAddress.detail": "Changes nothing: the model decides it.",
}


def of_texts(*bodies: str) -> dict[str, str]:
    """Return the meanings of vLLM's options in bodies of texts, which read no conversations."""
    without_chat = ("add_generation_prompt", "chat_template", "continue_final_message", "messages")
    meanings = {
        **dict.fromkeys(without_chat, NO_CHAT),
        "chat_template_kwargs": ONLY_INSTRUCTION,
        "add_special_tokens": "Refused if false.",
        "normalize": NORMALIZE,
    }
    return {f"{body}.{field}": meaning for body in bodies for field, meaning in meanings.items()}
