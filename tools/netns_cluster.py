"""Several hosts on one machine: network namespaces joined by a switch, each with its own name and address.

    python -m tools.netns_cluster --nodes 2 -- launch/torchrun_multi.sh --config run.yaml ...

runs the command on every host with NNODES, NODE_RANK, MASTER_ADDR set, as a cluster's scheduler would. In
Python, `Cluster` also takes a host's link down and up again. Needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN) and
iproute2; `why_not` says what is missing.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

_HOSTS_FILES = Path("/etc/netns")


def why_not() -> str | None:
    """Why namespaces cannot be made here; None when they can."""
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"no {program} on this machine"
    name = f"tlt{os.getpid()}probe"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if done.returncode != 0:
        return f"ip netns add: {done.stderr.strip()}"
    try:
        made = subprocess.run(
            ["ip", "-n", name, "link", "add", "name", "veth0", "type", "veth", "peer", "name", "veth1"],
            capture_output=True,
            text=True,
        )
        inside = subprocess.run(
            ["ip", "netns", "exec", name, "unshare", "--uts", "hostname", "probe"],
            capture_output=True,
            text=True,
        )
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    failed = next((run for run in (made, inside) if run.returncode != 0), None)
    return None if failed is None else f"{' '.join(failed.args)}: {failed.stderr.strip()}"


class Cluster:
    """`count` hosts `node0`, `node1`, ... on one switch; a context manager that removes them again.

    Raises subprocess.CalledProcessError when the system refuses.
    """

    def __init__(self, count: int) -> None:
        self.names = [f"node{number}" for number in range(count)]
        self._prefix = f"tlt{os.getpid()}"
        self._switch = f"{self._prefix}switch"
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> "Cluster":
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for name in self._namespaces():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            shutil.rmtree(_HOSTS_FILES / name, ignore_errors=True)

    def start(
        self,
        node: int,
        command: Sequence[str],
        *,
        environment: dict[str, str] | None = None,
        output: IO | None = None,
    ) -> subprocess.Popen:
        """Run `command` on a host, under its host name; NNODES, NODE_RANK, MASTER_ADDR are set."""
        facts = {"NNODES": str(len(self.names)), "NODE_RANK": str(node), "MASTER_ADDR": "node0"}
        script = 'hostname "$0" && exec "$@"'
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._prefix + self.names[node], "unshare", "--uts",
             "sh", "-c", script, self.names[node], *command],
            env=os.environ | facts | (environment or {}),
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def link(self, node: int, *, up: bool) -> None:
        """Plug a host's cable in, or out of, the switch."""
        _ip("-n", self._switch, "link", "set", self.names[node], "up" if up else "down")

    def _namespaces(self) -> list[str]:
        return [self._switch, *(self._prefix + name for name in self.names)]

    def _build(self) -> None:
        addresses = {name: f"10.77.0.{number + 1}" for number, name in enumerate(self.names)}
        hosts = "127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in addresses.items())
        for namespace in self._namespaces():
            _ip("netns", "add", namespace)
        _ip("-n", self._switch, "link", "add", "name", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for name in self.names:
            host = self._prefix + name
            (_HOSTS_FILES / host).mkdir(parents=True)
            (_HOSTS_FILES / host / "hosts").write_text(hosts)
            _ip("-n", self._switch, "link", "add", "name", name, "type", "veth", "peer", "name", "eth0",
                "netns", host)  # fmt: skip
            _ip("-n", self._switch, "link", "set", "dev", name, "master", "switch")
            _ip("-n", self._switch, "link", "set", name, "up")
            _ip("-n", host, "address", "add", f"{addresses[name]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host, "link", "set", device, "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: what every host runs")
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    reason = why_not()
    if reason is not None:
        print(f"error: network namespaces cannot be made here: {reason}", file=sys.stderr)
        return 2
    with Cluster(args.nodes) as cluster:
        processes = [cluster.start(node, command) for node in range(args.nodes)]
        return max(process.wait() for process in processes)


if __name__ == "__main__":
    sys.exit(main())
