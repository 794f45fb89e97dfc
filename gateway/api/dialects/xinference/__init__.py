"""What Xinference's client asks before it embeds or ranks."""
