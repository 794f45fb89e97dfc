"""The Gemini API."""
