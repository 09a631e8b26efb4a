"""Taking images out of memory: to local disk, to shared storage as a stock DCP directory, to an object store.

Storage may hang for minutes, so all of it happens in a process of its own, which can be killed
(`python -m jurymast.storage`); `processes` is the agent's side of it.
"""
