"""Pictures and recordings in requests: reading what callers send, before it is sent on."""
