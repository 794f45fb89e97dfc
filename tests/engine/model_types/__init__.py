"""Every type of network in transformers that reads texts: served as transformers computes it, or refused.

Each type gets a checkpoint with random weights of a small size, written without a look at its code: sizes,
windows and numbers of experts are set by the names of a configuration's keys. The engine's vectors are
compared with those of `AutoModel`, one text at a time, for texts of several lengths, most of them beyond the
windows.

    make test-families                                           # all types, and the page; five minutes
    .venv/bin/python -m tests.engine.model_types phimoe esm      # prints the outcome of some types
    .venv/bin/python -m tests.engine.model_types --write         # writes docs/model-types.md
"""
