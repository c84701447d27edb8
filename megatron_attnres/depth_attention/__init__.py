"""The depth-attention operator and the state that flows through depth. Knows torch only."""
