"""Mutants that change nothing that anybody could see, by name, each with the reason."""

EQUIVALENT: dict[str, str] = {}
