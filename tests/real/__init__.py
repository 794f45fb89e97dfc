"""The adapters against real servers; `make test-real` runs this, `make test` does not."""
