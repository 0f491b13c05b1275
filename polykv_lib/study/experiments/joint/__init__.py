"""The joint plan's comparison: what fills each byte budget, and the rows it becomes."""
