"""Real texts of several languages, lengths and oddities: docstrings of Python and a few by hand."""

import inspect
import json
import unicodedata

MODULES = ("json", "asyncio", "pathlib", "collections", "itertools", "functools", "re", "socket", "csv")

PHRASES = (
    "The quick brown fox jumps over the lazy dog.",
    "Der schnelle braune Fuchs springt über den faulen Hund.",
    "Le vif renard brun saute par-dessus le chien paresseux.",
    "El veloz zorro marrón salta sobre el perro perezoso.",
    "Быстрая коричневая лиса перепрыгивает через ленивую собаку.",
    "素早い茶色の狐がのろまな犬を飛び越える。",
    "敏捷的棕色狐狸跳过了懒狗。",
    "الثعلب البني السريع يقفز فوق الكلب الكسول",
    "תשועל חום מהיר קופץ מעל הכלב העצלן",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है",
    "빠른 갈색 여우가 게으른 개를 뛰어넘는다",
    "Γρήγορη καφέ αλεπού πηδάει πάνω από το τεμπέλικο σκυλί",
    "สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัขขี้เกียจ",
    "Zażółć gęślą jaźń",
    "Pijamalı hasta yağız şoföre çabucak güvendi",
)

ODDITIES = (
    " ",
    "\n\t \r\n",
    "a",
    ".",
    "  leading and trailing  ",
    "tabs\tand\nnew\nlines",
    "UPPER lower MiXeD",
    "😀 😃 👩‍👩‍👧‍👦 🇩🇪 emoji",
    "e\u0301 and é are the same letter",
    unicodedata.normalize("NFD", "Größe Ångström"),
    "zero\u200bwidth\ufeffspace",
    "null\x00byte",
    "[CLS] [SEP] [MASK] specials in the text",
    "https://example.org/a/very/long/path?with=query&and=more#fragment",
    "def f(x):\n    return x ** 2  # code",
    "3.14159 2,718,281 1e-9 0xDEADBEEF",
    "\ufdfa one character, many tokens",
    "x" * 500,
    "word " * 2000,
    "длинный текст " * 400,
    "長い文章。" * 300,
)


def real_texts() -> list[str]:
    """Return at least 200 texts, none empty, in a fixed order."""
    docstrings = []
    for name in MODULES:
        module = __import__(name)
        for _, member in sorted(inspect.getmembers(module), key=lambda pair: pair[0]):
            text = inspect.getdoc(member) if callable(member) else None
            if text and text not in docstrings:
                docstrings.append(text)
    assert json.__doc__ is not None
    return [*PHRASES, *ODDITIES, json.__doc__, *docstrings[:200]]
