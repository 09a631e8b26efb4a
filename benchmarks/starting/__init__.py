"""What `start.py` runs inside of ranks."""
