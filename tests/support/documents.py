"""The commands that README, CONTRIBUTING and the documents tell people to type."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")),
             ROOT / "slurm/testcluster/README.md", ROOT / "slurm/site/README.md"]  # fmt: skip
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    """(document, command) of each, with what follows it to the end of a here-document."""
    found = []
    for document in DOCUMENTS:
        for block in BLOCK.findall(document.read_text()):
            lines = iter(re.sub(r"\\\n", " ", block).splitlines())
            for line in lines:
                if end := re.search(r"<<-?'?(\w+)'?", line):
                    line += "\n" + "\n".join(iter(lines.__next__, end[1]))
                if line.strip() and not line.startswith("#"):
                    found.append((document.name, re.sub(r"\s+#.*", "", line)))
    return found
