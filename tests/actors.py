"""Actor of changes that a test makes in a store itself."""

from gateway.audit.records import Actor

TESTER = Actor("tester@host", "command")
