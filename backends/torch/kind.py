"""Facts about the built-in engine that are known without its adapter."""

from backends.contract import ServerKind

ENGINE = ServerKind("torch", "backends.torch.serving.client", cuts_inputs=True)
