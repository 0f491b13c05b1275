"""What the experiments on eviction share: items, plans, what is scored, and the rows it becomes."""
