"""Endpoints for operators: admin API, status, probes, metrics, and the web page."""
