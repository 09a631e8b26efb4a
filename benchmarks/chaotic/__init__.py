"""Parts of chaos.py: plans, what strikes, and what is held against it."""
