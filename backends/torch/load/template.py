"""Choice of a reranker's template: the operator's, the checkpoint's own, or that of a published model.

A chat template is rendered once, with marks in place of instruction, query and document.
"""

import re
from collections.abc import Iterator
from typing import Any

from backends.contract.errors import ModelUnavailable
from backends.recipe.bert_config import read_bert
from backends.recipe.chat_template import read_chat_template
from backends.recipe.files import CheckpointFiles
from backends.recipe.options import RerankPrompt, TaskSettings
from backends.recipe.recipe import Recipe
from backends.recipe.rerank_template import (
    FAMILIES,
    Placeholder,
    Prompt,
    RerankTemplate,
    published_family,
    split_at,
    written_template,
)

INSTRUCTION_MARK, QUERY_MARK, DOCUMENT_MARK = (
    "\u2983instruction\u2984",
    "\u2983query\u2984",
    "\u2983document\u2984",
)
MARKS: dict[str, Placeholder] = {QUERY_MARK: "query", DOCUMENT_MARK: "document"}
MARKS_WITH_INSTRUCTION: dict[str, Placeholder] = {INSTRUCTION_MARK: "instruction", **MARKS}
ROLES = ("query", "document")
WAY_OUT = (
    f"set `rerank_template` of its upstream to the template that it was trained with: {', '.join(FAMILIES)}, "
    "or a mapping with `prompt`, `positive` and `negative`"
)


def read_template(files: CheckpointFiles, recipe: Recipe, settings: TaskSettings) -> RerankTemplate:
    """Return the template of the pairs that a model scores; for other models it is unused.

    Raises: ModelUnavailable if neither files nor settings state it, or the settings do not fit the model.
    """
    if recipe.kind == "language":
        return _of_language_model(files, settings)
    if recipe.kind == "classifier" and len(recipe.labels) == 1:
        return _of_reranking_classifier(files, settings)
    if settings.rerank_template is not None:
        raise ModelUnavailable(
            f"{files.checkpoint} gives no single score for a pair, though `rerank_template` is set; leave it "
            "out"
        )
    return RerankTemplate(query_prefix=_default_prompt(files) if recipe.kind == "classifier" else "")


def _of_language_model(files: CheckpointFiles, settings: TaskSettings) -> RerankTemplate:
    template = _configured(settings)
    if template is None and not _names_roles(files):
        # A template for conversations renders these roles too, as no reranker was trained.
        template = _published(settings)
    template = template or _of_logit_score(files) or _of_hints(files) or _published(settings)
    if template is None:
        raise ModelUnavailable(
            f"{files.checkpoint} is a language model, and its files do not state how it scores a document; "
            f"{WAY_OUT}"
        )
    if template.positive is None:
        raise ModelUnavailable(
            f"{files.checkpoint} has no classifier, so that its `rerank_template` needs a `positive` token"
        )
    return template


def _of_reranking_classifier(files: CheckpointFiles, settings: TaskSettings) -> RerankTemplate:
    written = settings.rerank_template
    if isinstance(written, RerankPrompt) and written.positive is not None:
        raise ModelUnavailable(
            f"{files.checkpoint} has a classifier, which scores; leave `positive` and `negative` out of its "
            "`rerank_template`"
        )
    template = _configured(settings) or _published(settings) or _of_roles(files)
    # Nothing separates the two texts of a pair in such a network.
    if template is None and _is_decoder(files):
        raise ModelUnavailable(
            f"{files.checkpoint} is a language model with a classifier whose files do not state the prompt "
            f"around a query and its document; {WAY_OUT}, without tokens"
        )
    return template or RerankTemplate(query_prefix=_default_prompt(files))


def _is_decoder(files: CheckpointFiles) -> bool:
    if read_bert(files.config) is not None:
        return False
    from backends.torch.stock.architectures import is_decoder

    return is_decoder(str(files.config.get("model_type")))


def template_notes(files: CheckpointFiles, recipe: Recipe, settings: TaskSettings) -> Iterator[str]:
    """Yield a note if pairs are put into a chat template that does not name a reranker's roles."""
    scores_pairs = recipe.kind == "language" or (recipe.kind == "classifier" and len(recipe.labels) == 1)
    is_stated = settings.rerank_template is not None or published_family(settings.model) is not None
    if not scores_pairs or is_stated or _names_roles(files) or not _of_roles(files):
        return
    yield (
        "pairs are put into the checkpoint's chat template, as in sentence-transformers, although it does "
        "not name the roles query and document; if the model was trained with another prompt, set "
        "`rerank_template` of the upstream"
    )


def _names_roles(files: CheckpointFiles) -> bool:
    """Return whether the chat template treats the roles of a reranker apart from others."""
    template = read_chat_template(files)
    return template is not None and all(re.search(rf"['\"]{role}['\"]", template.source) for role in ROLES)


def _configured(settings: TaskSettings) -> RerankTemplate | None:
    configured = settings.rerank_template
    if configured is None:
        return None
    return FAMILIES[configured] if isinstance(configured, str) else written_template(configured)


def _published(settings: TaskSettings) -> RerankTemplate | None:
    family = published_family(settings.model)
    return None if family is None else FAMILIES[family]


def _of_logit_score(files: CheckpointFiles) -> RerankTemplate | None:
    """Return the template of sentence-transformers' module for language models. Raises: ModelUnavailable."""
    if files.module_folder("LogitScore") is None:
        return None
    score = files.module_config("LogitScore")
    tokens = score.get("true_token_id"), score.get("false_token_id")
    if not _reads_messages(files):
        return RerankTemplate((), (), *tokens, query_prefix=_default_prompt(files))
    prompt, instructed = _role_prompts(files)
    if not prompt:
        raise ModelUnavailable(
            f"{files.checkpoint} has a chat template without the roles query and document; {WAY_OUT}"
        )
    return RerankTemplate(prompt, instructed, *tokens)


def _of_hints(files: CheckpointFiles) -> RerankTemplate | None:
    """Return the template that options of vLLM in config.json describe."""
    if files.config.get("is_original_qwen3_reranker"):
        return FAMILIES["qwen3"]
    tokens = files.config.get("classifier_from_token") or []
    if not 1 <= len(tokens) <= 2 or (found := _of_roles(files)) is None:
        return None
    # The token that rejects a document comes first.
    negative = tokens[0] if len(tokens) == 2 else None
    return RerankTemplate(found.prompt, found.instructed, tokens[-1], negative)


def _of_roles(files: CheckpointFiles) -> RerankTemplate | None:
    """Return the template of a chat with the roles query and document, without tokens that answer it."""
    prompt, instructed = _role_prompts(files) if _reads_messages(files) else ((), ())
    return RerankTemplate(prompt, instructed) if prompt else None


def _reads_messages(files: CheckpointFiles) -> bool:
    modalities = files.transformer_config.get("modality_config")
    if modalities is not None and "message" not in modalities:
        return False
    return files.has("chat_template.jinja") or bool(files.tokenizer_config.get("chat_template"))


def _role_prompts(files: CheckpointFiles) -> tuple[Prompt, Prompt]:
    """Return the prompts of calls without and with an instruction; () for one that the template lacks."""
    plain, instructed = _render(files, [_default_prompt(files), INSTRUCTION_MARK])
    return split_at(plain, MARKS), split_at(instructed, MARKS_WITH_INSTRUCTION)


def _default_prompt(files: CheckpointFiles) -> str:
    """Return the prompt that sentence-transformers puts before a query, or into a chat as system message."""
    config = files.sentence_config
    return config.get("prompts", {}).get(config.get("default_prompt_name")) or ""


def _render(files: CheckpointFiles, instructions: list[str]) -> list[str]:
    """Return the chat around the marks with each instruction; "" if the template does not support it."""
    import transformers

    from backends.torch.inputs.bounded_rendering import FAULTS

    options: dict[str, Any] = files.transformer_config.get("processing_kwargs", {}).get("chat_template", {})
    # A flag of sentence-transformers, not a variable of the template.
    variables = {name: value for name, value in options.items() if name != "restore_suffix"}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(files.checkpoint, local_files_only=True)
        chats = [_messages(files, instruction) for instruction in instructions]
        return [tokenizer.apply_chat_template(chat, tokenize=False, **variables) for chat in chats]
    except (OSError, *FAULTS):
        # A template may reject roles that it does not support.
        return ["" for _ in instructions]


def _messages(files: CheckpointFiles, instruction: str) -> list[dict[str, Any]]:
    texts = [("system", instruction), ("query", QUERY_MARK), ("document", DOCUMENT_MARK)]
    message = files.transformer_config.get("modality_config", {}).get("message", {})
    is_structured = isinstance(message, dict) and message.get("format") == "structured"
    return [
        {"role": role, "content": [{"type": "text", "text": text}] if is_structured else text}
        for role, text in texts
        if text
    ]
