"""All that a supervisor decides: `machine` puts the machines of the other rooms together."""
