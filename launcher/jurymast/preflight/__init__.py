"""A node's test process (`python -m jurymast.preflight`), the only part of pre-flight that imports torch."""
