"""A Ray node that our programs start is reached from this machine alone."""

import json
import os
import subprocess
import sys
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from mri_alm.errors import InputError
from mri_alm.runtime.tasks import Pool, joined, run_tasks

# Starts a node, runs a task on it, and says where its processes listen: lines of /proc/net/tcp and tcp6.
LISTENING = """
import json, os, time
from pathlib import Path
from mri_alm.errors import InputError
from mri_alm.runtime.tasks import Pool, joined, run_tasks

def family(root):
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            pass
    found = {root}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found

def sockets():
    inodes = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                inodes[words[9]] = words[1].split(":")[0]
    found = {}
    for pid in family(os.getpid()):
        try:
            opened = [os.readlink(one) for one in Path("/proc", str(pid), "fd").iterdir()]
            name = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\\0")[0].decode().rpartition("/")[2]
        except OSError:
            continue
        for link in opened:
            if link.startswith("socket:[") and link[8:-1] in inodes:
                found.setdefault(name, []).append(inodes[link[8:-1]])
    return found

pool = Pool("ray", 1)
try:
    with joined(pool):
        (outcome,) = run_tasks(len, ["ab"], pool)
        print(json.dumps([outcome.get(), sockets()]))
except InputError as error:
    print(json.dumps([str(error), {}]))
"""


def address(words: str) -> IPv4Address | IPv6Address:
    """An address as the kernel's table writes it: words of 32 bits in the machine's order."""
    packed = b"".join(bytes.fromhex(words[n : n + 8])[::-1] for n in range(0, len(words), 8))
    found = ip_address(packed)
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found


def test_addresses_are_read_as_the_kernel_writes_them() -> None:
    told = {
        "0100007F": "127.0.0.1",
        "00000000": "0.0.0.0",  # noqa: S104
        "0" * 32: "::",
        "00000000000000000000000001000000": "::1",
        "0000000000000000FFFF00000100007F": "127.0.0.1",
    }
    assert {words: str(address(words)) for words in told} == told


@pytest.mark.slow
def test_every_port_of_a_node_started_here_is_of_the_loopback() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'mri-alm[cluster]'")
    if not Path("/proc/net/tcp").exists():
        pytest.skip("this system does not say in /proc who listens where")
    patience = {"RAY_raylet_start_wait_time_s": "100", "RAY_agent_register_timeout_ms": "90000"}  # a busy machine
    unset = {name: value for name, value in os.environ.items() if name != "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LISTENING],
        cwd=ROOT,
        env=unset | patience,
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    result, found = json.loads(done.stdout.splitlines()[-1])
    if not found:
        pytest.skip(f"Ray's node did not come up: {result[:90]}")
    assert result == 2
    listening = {name: sorted({str(address(one)) for one in several}) for name, several in found.items()}
    assert {"gcs_server", "raylet"} <= listening.keys()
    assert {name: [one for one in ips if not ip_address(one).is_loopback] for name, ips in listening.items()} == {
        name: [] for name in listening
    }


class Recorder:
    """Stands in for Ray: keeps how it was started, or does not come up."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked = error, dict[str, Any]()

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        self.asked = options
        if self.error:
            raise self.error

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize("where", [None, "head:6379"])
def test_what_ray_is_asked_for(monkeypatch: pytest.MonkeyPatch, where: str | None) -> None:
    """A cluster of others keeps its addresses: a driver that hid behind the loopback could not be reached by it."""
    ray = Recorder()
    monkeypatch.setattr("mri_alm.runtime.tasks._ray", lambda: ray)
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "as before")
    with joined(Pool("ray", address=where)):
        pass
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    own = {"address": "local", "_node_ip_address": "127.0.0.1", "include_dashboard": False}
    assert ray.asked == quiet | ({"address": where} if where else own)
    assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == ("as before" if where else "0")


def test_a_node_that_does_not_come_up_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises a plain Exception then."""
    ray = Recorder(Exception("The current node timed out during startup."))
    monkeypatch.setattr("mri_alm.runtime.tasks._ray", lambda: ray)
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "as before")
    with pytest.raises(InputError, match=r"There is no Ray cluster at this machine \(The current node timed out"):
        list(run_tasks(len, ["ab"], Pool("ray")))
