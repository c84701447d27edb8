"""What a trained model is worth: perplexity, tasks, generated text, on any layout."""
