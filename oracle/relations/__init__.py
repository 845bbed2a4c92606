"""Relations between calls of one kernel: what must stay when a call is changed, and what must not (`table` lists them)."""
