"""Several runs measured alike, side by side."""
