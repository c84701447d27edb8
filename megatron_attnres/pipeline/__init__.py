"""The pipeline plan, its communication and the step over Megatron-Core's schedules."""
