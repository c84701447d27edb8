"""Many runs of one grid: planned, launched, looked after."""
