"""The inversion's controls: what changes the cache, what is read after it, and the rows of it."""
