"""Conversations and texts without special tokens on the engine, compared with transformers."""

import asyncio
import json
import sys
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoModel, AutoTokenizer

from backends.contract import Chat, Classify, ClassifyReply, Embed, EmbedReply, Truncate
from backends.contract.errors import InvalidWork, UnsupportedWork
from backends.torch.passes.engine import RENDERING
from backends.torch.passes.loaded_model import LoadedModel
from tests.engine.checkpoints import ENCODERS, make_classifier, make_encoder
from tests.engine.engines import engine_on, load_tiny, run_work
from tests.waiting import PATIENCE_S

TEXTS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no role ' + message['content']) }}{% endif %}"
    "{{ '[CLS] ' + message['role'] + ' : ' + message['content'] + ' [SEP] ' }}{% endfor %}"
    "{% if task %}task {{ task }} {% endif %}{% if add_generation_prompt %}[CLS] assistant :{% endif %}"
)
PARTS_TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }} {% endif %}{% endfor %}[SEP] {% endfor %}"
)
EITHER_TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part['text'] }}{% endfor %}{% endif %} [SEP] {% endfor %}"
)
PLAIN = Chat()
TALK = [
    {"role": "system", "content": "find papers"},
    {"role": "user", "content": "what is a panda ?"},
    {"role": "assistant", "content": "a bear"},
]


def checkpoint_with(minilm: Path, folder: Path, template: Any, *, labels: int = 0) -> Path:
    """Return a tiny checkpoint with this chat template, None without one; labels: of a classifier."""
    config = ENCODERS["bert"][0]()
    if labels:
        make_classifier(config, minilm, folder, labels)
    else:
        make_encoder(config, minilm, folder)
    path = folder / "tokenizer_config.json"
    token = {"__type": "AddedToken", "content": "[MASK]", "special": True}
    stated = json.loads(path.read_text()) | {"bos_token": token, "chat_template": template}
    path.write_text(json.dumps(stated))
    return folder


@pytest.fixture(scope="module")
def model(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Path]:
    folder = checkpoint_with(minilm, tmp_path_factory.mktemp("chat"), TEXTS_TEMPLATE)
    return load_tiny(folder), folder


def chat_work(messages: Any, chat: Chat = PLAIN, **options: Any) -> Embed:
    """Return work with one conversation."""
    return Embed((json.dumps(messages),), prompt_name="", chat=chat, special_tokens=False, **options)


def ids_of(model: LoadedModel, work: Embed | Classify) -> list[int]:
    (sequence,) = model.preparer.prepare(work).sequences
    return sequence.ids


@pytest.mark.parametrize(
    ("chat", "options"),
    [
        (Chat(), {}),
        (Chat(add_generation_prompt=True), {"add_generation_prompt": True}),
        (Chat(continue_final_message=True), {"continue_final_message": True}),
        (Chat(variables='{"task": "search", "unread": [1]}'), {"task": "search"}),
        (Chat(variables='{"bos_token": "[PAD]"}'), {"bos_token": "[PAD]"}),
    ],
    ids=str,
)
def test_renders_as_transformers_does(
    model: tuple[LoadedModel, Path], chat: Chat, options: dict[str, Any]
) -> None:
    loaded, folder = model
    tokenizer = AutoTokenizer.from_pretrained(folder)

    expected = tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=False, **options)

    assert expected == ids_of(loaded, chat_work(TALK, chat))
    assert expected != tokenizer.apply_chat_template(TALK[:2], tokenize=True, return_dict=False, **options)


@pytest.mark.parametrize("role", ["query", "document"])
def test_any_role_reaches_a_template_and_an_empty_message_may_stay_open(
    minilm: Path, tmp_path: Path, role: str
) -> None:
    template = "{% for message in messages %}{{ message.role }} : {{ message.content }} {% endfor %}"
    folder = checkpoint_with(minilm, tmp_path, template)
    loaded, tokenizer = load_tiny(folder), AutoTokenizer.from_pretrained(folder)
    # As Dify's plugin sends a text: with parts, and an answer that has not begun.
    talk = [TALK[0], {"role": role, "content": "pandas"}, {"role": "assistant", "content": ""}]
    parts = [each | {"content": [{"type": "text", "text": each["content"]}]} for each in talk]

    text = tokenizer.apply_chat_template(talk, tokenize=False, continue_final_message=True)
    expected = tokenizer(text, add_special_tokens=True)["input_ids"]
    work = Embed(
        (json.dumps(parts),), prompt_name="", chat=Chat(continue_final_message=True), special_tokens=True
    )

    assert f"{role} : pandas" in text
    assert expected == ids_of(loaded, work)


async def test_embeds_conversations_and_bare_texts(model: tuple[LoadedModel, Path]) -> None:
    loaded, folder = model
    tokenizer, network = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    text = tokenizer.apply_chat_template(TALK, tokenize=False)

    for work, special in (
        (chat_work(TALK), False),
        (Embed((text,), special_tokens=False), False),
        (Embed((text,)), True),
    ):
        reply = await run_work(engine_on(loaded), work, EmbedReply)
        encoded = tokenizer(text, add_special_tokens=special, return_tensors="pt")
        with torch.no_grad():
            mean = network(**encoded).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(mean / np.linalg.norm(mean), reply.vectors[0], atol=1e-4)
        assert encoded["input_ids"].shape[1] == reply.tokens


async def test_classifies_conversations(minilm: Path, tmp_path: Path) -> None:
    loaded = load_tiny(checkpoint_with(minilm, tmp_path, TEXTS_TEMPLATE, labels=3))
    text = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(TALK, tokenize=False)
    chat = Classify((json.dumps(TALK),), chat=Chat(), special_tokens=False)

    rendered = await run_work(engine_on(loaded), chat, ClassifyReply)
    bare = await run_work(engine_on(loaded), Classify((text,), special_tokens=False), ClassifyReply)
    plain = await run_work(engine_on(loaded), Classify((text,)), ClassifyReply)

    np.testing.assert_allclose(bare.scores, rendered.scores, atol=1e-6)
    assert np.abs(plain.scores - rendered.scores).max() > 1e-3


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TEXTS_TEMPLATE, "[MASK][CLS] user : red\nblue [SEP] "),
        (PARTS_TEMPLATE, "user red blue [SEP] "),
        (EITHER_TEMPLATE, "user redblue [SEP] "),
    ],
    ids=["texts", "parts", "either"],
)
def test_parts_of_a_message_reach_a_template_as_it_reads_them(
    minilm: Path, tmp_path: Path, template: str, expected: str
) -> None:
    loaded = load_tiny(checkpoint_with(minilm, tmp_path, template))
    parts = [{"type": "text", "text": "red"}, {"type": "text", "text": "blue"}]

    work = chat_work([{"role": "user", "content": parts}])

    assert ids_of(loaded, Embed((expected,), special_tokens=False)) == ids_of(loaded, work)
    whole, one_part = ([{"role": "user", "content": red}] for red in ("red", parts[:1]))
    assert ids_of(loaded, chat_work(whole)) == ids_of(loaded, chat_work(one_part))


def test_the_template_may_have_a_name_or_a_file(minilm: Path, tmp_path: Path) -> None:
    named = [{"name": "other", "template": "x"}, {"name": "default", "template": PARTS_TEMPLATE}]
    folder = checkpoint_with(minilm, tmp_path, named)
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(TALK, tokenize=False)
    by_name = load_tiny(folder)
    assert PARTS_TEMPLATE == by_name.recipe.chat.source
    (folder / "chat_template.jinja").write_text(TEXTS_TEMPLATE)

    assert TEXTS_TEMPLATE == load_tiny(folder).recipe.chat.source
    # Its string contents have no parts, which transformers leaves to the caller.
    assert "panda" not in expected
    assert ids_of(by_name, chat_work(TALK))


@pytest.mark.parametrize("truncate", [Truncate.LEFT, Truncate.RIGHT])
def test_cuts_at_the_length_without_special_tokens(
    model: tuple[LoadedModel, Path], truncate: Truncate
) -> None:
    loaded, _ = model
    text = " ".join(str(number % 10) for number in range(400))
    whole = loaded.preparer.tokenizer.ids([text])[0]

    for most, length in ((None, loaded.recipe.max_tokens), (7, 7)):
        work = Embed((text,), truncate=truncate, max_tokens=most, special_tokens=False)
        prepared = loaded.preparer.prepare(work)
        kept = whole[-length:] if truncate is Truncate.LEFT else whole[:length]
        assert (kept, (0,)) == (prepared.sequences[0].ids, prepared.truncated)


@pytest.mark.parametrize(
    ("work", "error", "message"),
    [
        (chat_work([{"role": "tool", "content": "secret"}]), InvalidWork, "refuses this conversation"),
        (chat_work(TALK, Chat(variables='{"task": {"a": 1}, "bos_token": {}}')), None, ""),
        (chat_work(TALK, Chat(variables='{"conversations": 1}')), InvalidWork, "refuses"),
        (chat_work(TALK, Chat(template="{{ messages }}")), UnsupportedWork, "`chat_template` of a request"),
        (chat_work([{"role": "user", "content": "w " * 40_000}]), InvalidWork, "maximum context length"),
        (
            chat_work([{"role": "user", "content": "w " * 400}], truncate=Truncate.ERROR),
            InvalidWork,
            "maximum context length",
        ),
        (Embed((" ",), special_tokens=False), InvalidWork, "no token"),
    ],
    ids=str,
)
def test_refuses_with_the_reason_and_without_the_messages(
    model: tuple[LoadedModel, Path], work: Embed, error: type[Exception] | None, message: str
) -> None:
    if error is None:
        assert ids_of(model[0], work)
        return
    with pytest.raises(error, match=message) as caught:
        model[0].preparer.prepare(work)
    assert "secret" not in str(caught.value)


def test_refuses_variables_that_a_template_may_repeat_too_often(model: tuple[LoadedModel, Path]) -> None:
    talk = [{"role": "user", "content": "hi"}] * 100
    chat = Chat(variables=json.dumps({"task": "x" * 60_000}))

    with pytest.raises(InvalidWork, match=r"repeat the 600\d\d characters of `chat_template_kwargs`"):
        ids_of(model[0], chat_work(talk, chat))


def test_a_model_without_a_template_refuses_conversations(minilm: Path, tmp_path: Path) -> None:
    loaded = load_tiny(checkpoint_with(minilm, tmp_path, None))

    with pytest.raises(UnsupportedWork, match="no chat template"):
        loaded.preparer.prepare(chat_work(TALK))


FILLERS = "{% for i in range(times) %}{{ filler }}{% endfor %}"
REPEATS = {
    "output": FILLERS,
    "macro": f"{{% macro all() %}}{FILLERS}{{% endmacro %}}{{{{ all() | length }}}}",
    "variable": f"{{% set all %}}{FILLERS}{{% endset %}}{{{{ all | length }}}}",
}
LOOPS = {
    "nothing": "{% for i in range(times) %}{% for j in range(times) %}{% endfor %}{% endfor %}done",
    "a longer text": (
        "{% set all = namespace(text='') %}{% for i in range(times) %}{% for j in range(times) %}"
        "{% set all.text = all.text[-9:] ~ filler %}{% endfor %}{% endfor %}{{ all.text | length }}"
    ),
}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        *((template, "writes more than") for template in REPEATS.values()),
        *((template, "takes more than 1 s") for template in LOOPS.values()),
    ],
    ids=[*REPEATS, *LOOPS],
)
def test_a_template_writes_and_takes_no_more_than_the_bound(
    template: str, reason: str, minilm: Path, tmp_path: Path
) -> None:
    model = load_tiny(checkpoint_with(minilm, tmp_path, template))
    variables = json.dumps({"times": 99_999, "filler": "x" * 12_000})
    work = chat_work(TALK[:1], Chat(variables=variables))
    with pytest.raises(InvalidWork, match=reason):
        model.preparer.prepare(work)
    assert sys.gettrace() is None

    # Templates of other conversations are not bound by it.
    few = chat_work(TALK[:1], Chat(variables=json.dumps({"times": 2, "filler": "x"})))
    assert len(ids_of(model, few)) < 9
    assert "x" * 99_999 == ImmutableSandboxedEnvironment().from_string("{{ x }}").render(x="x" * 99_999)


async def test_a_text_does_not_wait_for_a_conversation(model: tuple[LoadedModel, Path]) -> None:
    engine, gate = engine_on(model[0]), Event()
    held = [RENDERING.submit(gate.wait, 60) for _ in range(4)]
    talk = asyncio.create_task(run_work(engine, chat_work(TALK), EmbedReply))
    long = Embed(tuple(f"a text of several words {place}" for place in range(40)))
    try:
        assert 40 == len((await run_work(engine, long, EmbedReply)).vectors)
        assert not talk.done()
    finally:
        gate.set()
    assert 1 == len((await talk).vectors)
    assert all(future.result(PATIENCE_S) for future in held)
