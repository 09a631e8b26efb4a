"""Checkpoints in memory: the images that a node's agent holds for ranks and other nodes. No torch."""
