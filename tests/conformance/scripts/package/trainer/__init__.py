"""A project that is started as a module."""

print("package", __name__, __spec__.name)
