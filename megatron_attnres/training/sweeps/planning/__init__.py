"""From a YAML grid to runs with their sizes, budgets and costs. No torch."""
