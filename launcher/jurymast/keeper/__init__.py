"""Checkpoints in memory: what a node's agent holds, and how ranks and other nodes get at it. No torch."""
