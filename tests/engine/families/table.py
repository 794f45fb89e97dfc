"""Table of all families, in the order of the page."""

from tests.engine.families import (
    adapted,
    bert,
    decoders,
    dual,
    end_tokens,
    language_rerankers,
    late_interaction,
    look_alikes,
    modernbert,
    own_code,
    pages,
    refused,
    rerankers,
    roberta,
    sparse,
    static,
    t5,
)
from tests.engine.families.family import Family

GROUPS = (
    bert,
    roberta,
    modernbert,
    decoders,
    adapted,
    t5,
    end_tokens,
    rerankers,
    language_rerankers,
    sparse,
    late_interaction,
    look_alikes,
    static,
    dual,
    pages,
    own_code,
    refused,
)
FAMILIES: tuple[Family, ...] = tuple(family for group in GROUPS for family in group.FAMILIES)
