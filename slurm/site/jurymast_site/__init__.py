"""What a site installs beside Slurm: the health check that drains nodes, and the sweep after jobs.

Runs as root on every node, so it uses nothing but Python's own library, starts programs without a shell,
and believes nothing that a user wrote. Needs Python 3.9.
"""
