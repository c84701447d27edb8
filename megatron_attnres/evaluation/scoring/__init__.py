"""Log probabilities of given tokens, on any layout."""
