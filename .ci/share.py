"""For the build: what `make package` has made in dist/share (manual pages and completions) goes along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MADE = "dist/share"


class ShareHook(BuildHookInterface):  # type: ignore[type-arg]
    """In a wheel as `share` of the environment, in a source distribution where it is found again."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files, if there are any."""
        top = Path(self.root, MADE)
        for file in sorted(top.rglob("*")):
            if file.is_file():
                below = file.relative_to(top).as_posix()
                if self.target_name == "wheel":
                    build_data["shared_data"][str(file)] = f"share/{below}"
                else:
                    build_data["force_include"][str(file)] = f"{MADE}/{below}"
