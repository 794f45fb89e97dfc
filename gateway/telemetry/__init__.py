"""Exporters of events. They decide nothing, and nothing waits for them."""
