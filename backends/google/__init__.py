"""Google: the Gemini API, Vertex AI and its ranking API."""
