"""What a node's keeper decides: see `machine`."""
