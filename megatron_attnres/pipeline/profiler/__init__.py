"""Measures a pipeline step: what every stage computes, sends and waits for, on one clock."""
