"""What an agent decides: its ranks, its connection to a supervisor, succession, and what it writes."""
