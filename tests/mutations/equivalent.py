"""Mutants that change nothing that anybody could see, by name, each with the reason."""

EQUIVALENT: dict[str, str] = {
    "keeper/transfer.py:ImageFetch.pull:swap:1:connection.send(GetBytes(image=_named(key), at=block.at, "
    "length=block.length, ways=ways)) asked.append(block)": (
        "`asked` is local, and nothing reads it between the two; if `send` raises, nothing reads it any more"
    ),
}
