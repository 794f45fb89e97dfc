"""Chat of a language model that reranks: its checkpoint's template, or Qwen3-Reranker's own words.

The template is rendered once, with marks in place of query and document.
"""

from pathlib import Path
from typing import Any

import transformers
from jinja2 import TemplateError

from backends.torch.files import CheckpointFiles
from backends.torch.preparing import PairTemplate

QUERY_MARK, DOCUMENT_MARK = "\u2983query\u2984", "\u2983document\u2984"
# Source: the model card of Qwen/Qwen3-Reranker-0.6B, "Transformers Usage".
QWEN3 = PairTemplate(
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: ",
    "\n<Document>: ",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)


def pair_template(checkpoint: Path) -> PairTemplate:
    """Return the text around a query and its document.

    It is the checkpoint's own template if that supports messages of the roles query and document, as
    sentence-transformers 6 writes pairs.
    """
    return _split(_render(checkpoint)) or QWEN3


def _render(checkpoint: Path) -> str:
    files = CheckpointFiles(checkpoint)
    if not files.has("chat_template.jinja") and "chat_template" not in files.tokenizer_config:
        return ""
    config = files.sentence_config
    instruction = config.get("prompts", {}).get(config.get("default_prompt_name"))
    options: dict[str, Any] = files.transformer_config.get("processing_kwargs", {}).get("chat_template", {})
    messages = [{"role": "query", "content": QUERY_MARK}, {"role": "document", "content": DOCUMENT_MARK}]
    if instruction:
        messages.insert(0, {"role": "system", "content": instruction})
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
        rendered: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except (OSError, ValueError, TemplateError):
        # A template may reject roles that it does not support.
        return ""
    return rendered


def _split(rendered: str) -> PairTemplate | None:
    """Split a rendered chat at its marks; None unless each mark appears once, the query's first."""
    before, query, rest = rendered.partition(QUERY_MARK)
    between, document, after = rest.partition(DOCUMENT_MARK)
    if not query or not document or QUERY_MARK in rest or DOCUMENT_MARK in before + after:
        return None
    return PairTemplate(before, between, after)
