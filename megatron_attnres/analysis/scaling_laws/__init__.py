"""Power laws of loss over compute, from runs to a fitted curve."""
