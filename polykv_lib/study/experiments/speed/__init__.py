"""What is timed and weighed: steps of agents, first tokens, openings, and how a time is taken."""
