"""`python -m jurymast.agent RUN_DIRECTORY [--node NAME]`: started by srun, once a node."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys

from jurymast.agent.agent import serve
from jurymast.errors import JurymastError
from jurymast.rundir import RunDirectory


def main() -> int:
    parser = argparse.ArgumentParser(prog="jurymast.agent")
    parser.add_argument("run_directory")
    parser.add_argument("--node", default=os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    parser.add_argument("--as-launcher", action="store_true", help="end with the run's exit code")
    parser.add_argument("--supervisor", default="", help="HOST:PORT to try until the run directory names one")
    arguments = parser.parse_args()
    host, _, port = arguments.supervisor.rpartition(":")
    hint = (host, int(port)) if host and port.isdigit() else None
    try:
        code = asyncio.run(serve(RunDirectory(arguments.run_directory), arguments.node, hint))
    except JurymastError as error:
        print(f"jurymast agent on {arguments.node}: {error}", file=sys.stderr)
        return error.exit_code
    return code if arguments.as_launcher else 0


if __name__ == "__main__":
    sys.exit(main())
