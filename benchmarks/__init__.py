"""Benchmarks: each file here but `common` is a script that prints one object; see README.md."""
