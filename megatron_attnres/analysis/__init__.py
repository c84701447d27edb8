"""What runs show, and what they would cost: read from results, no part of training."""
