"""Writes images to local disk, to shared storage as a stock DCP directory, and to an object store.

Storage may hang for minutes, so separate processes do this, which can be killed
(`python -m jurymast.storage`); `processes` is the agent's side.
"""
