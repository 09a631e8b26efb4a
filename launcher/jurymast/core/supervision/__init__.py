"""Everything that a supervisor decides. `machine` combines the machines of the other packages."""
