"""Servers of OpenAI's API, and hosted APIs that resemble it."""
