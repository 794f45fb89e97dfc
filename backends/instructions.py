"""Templates that express an instruction to an embedding model. Pure.

A template contains {instruction} once and ends with {text}, so that all before the text is a prompt.
"""

from collections.abc import Iterable

SLOT, TEXT = "{instruction}", "{text}"

_E5 = "Instruct: {instruction}\nQuery: {text}"
_QWEN3 = "Instruct: {instruction}\nQuery:{text}"
# Source: the model cards. The prompts of a checkpoint take precedence; some of these come without any.
PUBLISHED: dict[str, str] = {
    "intfloat/multilingual-e5-large-instruct": _E5,
    "intfloat/e5-mistral-7b-instruct": _E5,
    "Salesforce/SFR-Embedding-Mistral": _E5,
    "Salesforce/SFR-Embedding-2_R": _E5,
    "Linq-AI-Research/Linq-Embed-Mistral": _E5,
    "Alibaba-NLP/gte-Qwen2-1.5B-instruct": _E5,
    "Alibaba-NLP/gte-Qwen2-7B-instruct": _E5,
    "NovaSearch/stella_en_400M_v5": _E5,
    "NovaSearch/stella_en_1.5B_v5": _E5,
    "Qwen/Qwen3-Embedding-0.6B": _QWEN3,
    "Qwen/Qwen3-Embedding-4B": _QWEN3,
    "Qwen/Qwen3-Embedding-8B": _QWEN3,
    "BAAI/bge-multilingual-gemma2": "<instruct>{instruction}\n<query>{text}",
}
# The caller writes the whole prompt, of documents too.
WHOLE_PROMPT = "{instruction}{text}"
# Models whose instruction takes no part in pooling; a server that pools it is not known by these ids.
PUBLISHED_UNPOOLED: dict[str, str] = {
    "hkunlp/instructor-base": WHOLE_PROMPT,
    "hkunlp/instructor-large": WHOLE_PROMPT,
    "hkunlp/instructor-xl": WHOLE_PROMPT,
}
# How published prompts open and end; the text between them is the instruction.
FORMS = (("Instruct: ", "Query:"), ("<instruct>", "<query>"))


def instruction_prompt(template: str, instruction: str) -> str:
    """Return the prompt that puts an instruction before a text."""
    return template.removesuffix(TEXT).replace(SLOT, instruction)


def template_problem(template: str) -> str | None:
    """Return the fault of a template in the configuration, None if it is valid."""
    if template.count(SLOT) != 1 or template.count(TEXT) != 1 or not template.endswith(TEXT):
        return f"must contain {SLOT} once and end with {TEXT}, as in 'Instruct: {SLOT}\\nQuery: {TEXT}'"
    return None


def template_in(prompts: Iterable[str]) -> str | None:
    """Return the template that a model's prompts follow, None if they follow none or several."""
    templates = {template for template in map(_template_of, prompts) if template}
    return templates.pop() if len(templates) == 1 else None


def _template_of(prompt: str) -> str | None:
    head, _, last_line = prompt.rpartition("\n")
    instruction = head.rstrip()
    for opening, ending in FORMS:
        if (
            last_line.strip() == ending
            and instruction.startswith(opening)
            and instruction != opening.rstrip()
        ):
            return opening + SLOT + prompt[len(instruction) :] + TEXT
    return None
