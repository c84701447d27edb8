"""What depth attention attends to: weights and magnitudes of trained models, drawn and told."""
