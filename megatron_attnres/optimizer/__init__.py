"""AdamW over the ranks: ZeRO, parameter groups, gradient norm, learning-rate schedules."""
