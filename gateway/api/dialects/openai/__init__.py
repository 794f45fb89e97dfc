"""OpenAI's and Azure's API."""
