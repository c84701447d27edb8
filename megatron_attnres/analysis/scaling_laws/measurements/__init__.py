"""Points to fit: from sweeps or CSV, checked for belonging together."""
