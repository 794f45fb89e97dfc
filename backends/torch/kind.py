"""Facts about the built-in engine that are known without its adapter."""

from backends.contract import ServerKind

ENGINE = ServerKind(
    "torch",
    "backends.torch.serving.client",
    cuts_inputs=True,
    keys=frozenset(
        {
            *("revision", "dtype", "device", "compile", "runtime", "task", "pooling", "rerank_template"),
            *("adapter", "trust_remote_code", "code_revision", "process", "preload", "when_loading"),
        }
    ),
)
