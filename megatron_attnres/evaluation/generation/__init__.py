"""Text from prompts."""
