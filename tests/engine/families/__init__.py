"""Families of published checkpoints: one table of what the engine serves, what it refuses, and why.

A family is a group of checkpoints with the same architecture, tokenizer and module files. Its entry holds
their published configuration keys; the test makes random weights of a small size and a vocabulary of its own,
loads the checkpoint, and compares token ids, vectors and scores with the library that defines them.
`docs/models-tested.md` is generated from the same table.

To add a family, write a `Family` in the module of its architecture group (or a module of your own, named in
`table.GROUPS`), then:

    .venv/bin/python -m pytest tests/engine/families -q -k NAME
    .venv/bin/python -m tests.engine.families          # writes docs/models-tested.md

`config` and `files` carry the keys as published, except the sizes, which are `layout.SIZES`; the size of the
vocabulary is filled in. A family is `Served` only if its test passes. Keys come from public copies of the
published repositories where there are any, else from the libraries that read them and from memory.
"""
