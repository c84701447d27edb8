"""Process groups, CPU compatibility, and what ranks must agree on."""
