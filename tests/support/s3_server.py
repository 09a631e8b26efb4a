"""A real S3-compatible object store on this machine: OpenStack Swift from PyPI, one node, one replica."""

from __future__ import annotations

import getpass
import importlib.util
import os
import secrets
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from support.ports import free_port
from support.waiting import wait_until

KINDS = ("account", "container", "object", "proxy")
USER, KEY = "test:tester", "testing"
PIPELINE = "catch_errors gatekeeper healthcheck cache listing_formats s3api tempauth slo proxy-server"
FILTERS = {
    **dict.fromkeys(("catch_errors", "gatekeeper", "healthcheck", "listing_formats", "slo"), ""),
    "cache": "egg:swift#memcache",  # none runs, and it goes without
    # the smallest part is 5 MB in S3; here a little more than a small test checkpoint needs
    "s3api": "egg:swift#s3api\nallow_multipart_uploads = yes\nmin_segment_size = 1",
    "tempauth": "egg:swift#tempauth\nuser_test_tester = testing .admin",
}


def installed() -> bool:
    return importlib.util.find_spec("swift") is not None


class S3Server:
    """Started and stopped as often as a test likes; what it stores is in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports = {kind: free_port() for kind in KINDS}
        self._processes: list[subprocess.Popen[bytes]] = []
        (folder / "disk" / "d1").mkdir(parents=True)
        (folder / "swift.conf").write_text(
            f"[swift-hash]\nswift_hash_path_suffix = {secrets.token_hex(8)}\n"
            "[storage-policy:0]\nname = gold\ndefault = yes\n"
        )
        for kind in KINDS:
            (folder / f"{kind}.conf").write_text(self._configuration(kind))
            if kind != "proxy":
                self._make_ring(kind)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['proxy']}"

    @property
    def environment(self) -> dict[str, str]:
        """What fsspec and boto read."""
        return {
            "AWS_ACCESS_KEY_ID": USER,
            "AWS_SECRET_ACCESS_KEY": KEY,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def storage_options(self) -> dict[str, Any]:
        return {"key": USER, "secret": KEY, "endpoint_url": self.endpoint}

    def start(self) -> None:
        for kind in KINDS:
            program = Path(sys.executable).with_name(f"swift-{kind}-server")
            with open(self.folder / f"{kind}.log", "ab") as log:
                process = subprocess.Popen(
                    [str(program), f"{self.folder}/{kind}.conf"],
                    stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                )  # fmt: skip
            self._processes.append(process)
        wait_until("answer of the object store", self._healthy)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._processes.clear()

    def _healthy(self) -> bool:
        for kind, port in self._ports.items():
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthcheck", timeout=5):
                    pass
            except (OSError, urllib.error.URLError):
                assert all(process.poll() is None for process in self._processes), f"{kind} ended"
                return False
        return True

    def _configuration(self, kind: str) -> str:
        head = (
            f"[DEFAULT]\nbind_ip = 127.0.0.1\nbind_port = {self._ports[kind]}\nworkers = 0\n"
            f"user = {getpass.getuser()}\nswift_dir = {self.folder}\ndevices = {self.folder}/disk\n"
            "mount_check = false\ndisable_fallocate = true\nlog_level = WARNING\n"
            f"log_address = {self.folder}/no-syslog\n"
        )
        if kind != "proxy":
            return (
                f"{head}[pipeline:main]\npipeline = healthcheck {kind}-server\n"
                f"[filter:healthcheck]\nuse = egg:swift#healthcheck\n"
                f"[app:{kind}-server]\nuse = egg:swift#{kind}\n"
            )
        filters = "".join(
            f"[filter:{name}]\nuse = {text or f'egg:swift#{name}'}\n" for name, text in FILTERS.items()
        )
        application = "[app:proxy-server]\nuse = egg:swift#proxy\nallow_account_management = true\n"
        return (
            f"{head}[pipeline:main]\npipeline = {PIPELINE}\n{filters}{application}account_autocreate = true\n"
        )

    def _make_ring(self, kind: str) -> None:
        builder = str(self.folder / f"{kind}.builder")
        tool = str(Path(sys.executable).with_name("swift-ring-builder"))
        for words in (
            ["create", "4", "1", "0"],
            ["add", f"r1z1-127.0.0.1:{self._ports[kind]}/d1", "1"],
            ["rebalance"],
        ):
            done = subprocess.run(
                [tool, builder, *words], capture_output=True, text=True, env=dict(os.environ)
            )
            assert done.returncode == 0, done.stdout + done.stderr
