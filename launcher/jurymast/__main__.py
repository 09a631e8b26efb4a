"""`python -m jurymast`."""

from __future__ import annotations

import sys

from jurymast.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
