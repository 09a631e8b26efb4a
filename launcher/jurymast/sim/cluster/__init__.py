"""A whole cluster in one process: the real machines of the supervisor and the agents, on nodes, a network and
storage that misbehave by seed. `__main__` has the command."""
