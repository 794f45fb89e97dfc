"""Inputs of vLLM's pooling requests: texts, or one conversation with the fields of its chat template.

Source: vLLM 0.33, entrypoints/pooling/base/protocol.py. Releases before 0.33 read one conversation a request.
"""

from collections.abc import Sequence

import msgspec

from backends.contract import Chat, Classify, Embed, EmbedParts, Encode, Output, Part
from backends.contract.errors import BackendError, InvalidWork, UnsupportedWork
from backends.http.media import content_of
from backends.http.openai_envelope import REFUSED_INPUT
from backends.vllm.wire import BASE64, Body


def input_fields(work: Embed | Encode | Classify) -> Body:
    """Return the fields that carry the inputs of a request. Raises: UnsupportedWork."""
    if work.chat is None:
        return {"input": work.inputs} | ({} if work.special_tokens else {"add_special_tokens": False})
    if len(work.inputs) != 1:
        raise UnsupportedWork("vLLM reads one conversation in a request")
    (conversation,) = work.inputs
    assert isinstance(conversation, str)
    messages = {"messages": msgspec.Raw(conversation.encode()), "add_special_tokens": work.special_tokens}
    return messages | _template_fields(work.chat)


def parts_body(work: EmbedParts, parts: Sequence[Part], raw_switch: str | None) -> Body:
    """Return the body of a request for one input with images or sound.

    raw_switch: turns the normalization off, if the server has one. Raises: UnsupportedWork.
    """
    if not work.normalize and raw_switch is None:
        raise UnsupportedWork("this upstream always normalizes its vectors")
    if work.max_tokens is not None:
        raise UnsupportedWork("vLLM cuts no input with images or sound: leave out `truncate_prompt_tokens`")
    switch: Body = {raw_switch: False} if raw_switch else {}
    form: Body = BASE64 if work.output is Output.DENSE else {"task": "token_embed"}
    fields: Body = {} if work.chat is None else _template_fields(work.chat)
    if work.chat is None and len(parts) == 1 and isinstance(parts[0], str):
        # As a request for texts alone, so that its vector does not depend on its company.
        return {"input": parts[0]} | form | switch
    return {"messages": [{"role": "user", "content": content_of(parts)}]} | fields | form | switch


def _template_fields(chat: Chat) -> Body:
    template: Body = {} if chat.template is None else {"chat_template": chat.template}
    variables: Body = (
        {} if chat.variables == "{}" else {"chat_template_kwargs": msgspec.Raw(chat.variables.encode())}
    )
    return {
        "add_generation_prompt": chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message,
        **template,
        **variables,
    }


def explain_refusal(error: BackendError, chat: Chat | None) -> BackendError:
    """Return the error of a refused conversation with the likely reason."""
    if chat is None or not error.message.startswith(REFUSED_INPUT):
        return error
    if chat.template is not None:
        return InvalidWork(
            "the upstream refused `chat_template`: vLLM takes one only with --trust-request-chat-template; "
            "leave it out",
        )
    return InvalidWork(
        f"{error.message}: the model may have no chat template, or one that refuses these `messages`; "
        "send `input`"
    )
