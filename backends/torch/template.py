"""How a language model that reranks is asked: its checkpoint's chat template, or Qwen3-Reranker's own words.

The template is rendered once, with marks where query and document go.
"""

from pathlib import Path
from typing import Any

import transformers
from jinja2 import TemplateError

from backends.torch.files import Files
from backends.torch.preparing import Template

QUERY_MARK, DOCUMENT_MARK = "\u2983query\u2984", "\u2983document\u2984"
# Source: the model card of Qwen/Qwen3-Reranker-0.6B, "Transformers Usage".
QWEN3 = Template(
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: ",
    "\n<Document>: ",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)


def pair_template(checkpoint: Path) -> Template:
    """What stands around a query and its document.

    The checkpoint's own template where it knows messages of the roles query and document, as
    sentence-transformers 6 writes pairs.
    """
    return _cut(_rendered(checkpoint)) or QWEN3


def _rendered(checkpoint: Path) -> str:
    files = Files(checkpoint)
    if not files.has("chat_template.jinja") and "chat_template" not in files.tokenizer:
        return ""
    told = files.sentence
    instruction = told.get("prompts", {}).get(told.get("default_prompt_name"))
    options: dict[str, Any] = files.transformer.get("processing_kwargs", {}).get("chat_template", {})
    messages = [{"role": "query", "content": QUERY_MARK}, {"role": "document", "content": DOCUMENT_MARK}]
    if instruction:
        messages.insert(0, {"role": "system", "content": instruction})
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
        rendered: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except (OSError, ValueError, TemplateError):
        # A template may refuse roles that it does not know.
        return ""
    return rendered


def _cut(rendered: str) -> Template | None:
    """None unless both marks are there once, the query's first."""
    before, query, rest = rendered.partition(QUERY_MARK)
    between, document, after = rest.partition(DOCUMENT_MARK)
    if not query or not document or QUERY_MARK in rest or DOCUMENT_MARK in before + after:
        return None
    return Template(before, between, after)
