"""Programs that a site installs in Slurm: the health check that drains nodes, and the sweep after jobs.

They run as root on every node, so they use only Python's own library, start programs without a shell, and
trust nothing that a user wrote. They need Python 3.9.
"""
