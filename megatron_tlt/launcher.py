"""torchrun with manners: `python -m megatron_tlt.launcher [torchrun's options] -m megatron_tlt.pretrain ...`

Takes torchrun's command line and runs torchrun in this process. What it adds:
- several nodes meet before any rank starts: after 30 s each says which nodes are missing, after
  --join_timeout seconds it ends; a wrong MASTER_ADDR or a taken port is an error in one line;
- gloo is told the network card that leads to node 0, unless GLOO_SOCKET_IFNAME says another;
- SIGTERM and SIGUSR1 are passed on to the ranks, which save and end; torchrun would give them 30 s for the
  first and die of the second;
- the exit code is that of the run (0 finished, 4 saved and to be continued, 2 bad input, ...), where
  torchrun's is 1 for everything but 0.
"""

import errno
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType

from megatron_tlt.entry import EXIT_BAD_INPUT, EXIT_FILE_VARIABLE
from megatron_tlt.rendezvous import wait_for_all

import psutil
import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_FORWARDED = (signal.SIGTERM, signal.SIGUSR1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code for this node."""
    parser = torchrun.get_args_parser()
    parser.add_argument("--join_timeout", type=float, default=600.0, help="seconds to wait for all nodes")
    options = parser.parse_args(arguments)
    options.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"
    for number in _FORWARDED:
        signal.signal(number, _forward)
    try:
        if int(options.nnodes.split(":")[-1]) > 1 and options.rdzv_backend == "static":
            _meet(options)
    except (ValueError, TimeoutError, ConnectionError) as error:
        print(f"error: [node {options.node_rank}] {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
    with tempfile.TemporaryDirectory(prefix="megatron_tlt_") as folder:
        exit_file = Path(folder) / "exit_code"
        os.environ[EXIT_FILE_VARIABLE] = str(exit_file)
        code = _run(options)
        return int(exit_file.read_text()) if exit_file.exists() and code == 0 else code


def _run(options) -> int:
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"error: rank {rank} ended first, exit code {failure.exitcode}", file=sys.stderr, flush=True)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _forward(number: int, frame: FrameType | None) -> None:
    """Pass the signal on to the ranks, which are this process's children."""
    for child in psutil.Process().children():
        child.send_signal(number)


def _meet(options) -> None:
    """Wait until all nodes are there, in a store of its own on the port after torchrun's.

    Raises ValueError for an address or port that cannot be right, TimeoutError naming absent nodes.
    """
    nodes, node = int(options.nnodes), options.node_rank
    address, port = options.master_addr, options.master_port + 1
    reach = _own_address_towards(address)
    _name_interface(reach)
    if node == 0:
        _check_listening(address, options.master_port)
        _check_listening(address, port)
    print(
        f" node {node} of {nodes} ({socket.gethostname()}, {reach} on "
        f"{os.environ.get('GLOO_SOCKET_IFNAME')}): meeting at {address}:{port}",
        flush=True,
    )
    store = _connect(address, port, node=node, seconds=options.join_timeout)
    store.set(str(node), socket.gethostname())
    wait_for_all(store, nodes, seconds=options.join_timeout, what="nodes")
    store.set(f"seen{node}", "")
    if node == 0:  # its host stays until everyone has read it
        store.wait([f"seen{number}" for number in range(nodes)], timedelta(seconds=60))


def _connect(address: str, port: int, *, node: int, seconds: float) -> dist.Store:
    began = noticed = time.monotonic()
    while True:
        try:
            return dist.TCPStore(
                address, port, is_master=node == 0, wait_for_workers=False,
                timeout=timedelta(seconds=5),
            )  # fmt: skip
        except dist.DistError as error:
            now = time.monotonic()
            if now - began > seconds:
                raise ConnectionError(
                    f"node 0 does not answer at {address}:{port} within {seconds:.0f} s: is it "
                    "started? does MASTER_ADDR lead to it, and no firewall stand between? With several "
                    "network cards set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
                ) from error
            if now - noticed > 30:
                print(f" waiting for node 0 at {address}:{port} ({now - began:.0f} s)", flush=True)
                noticed = now
            time.sleep(0.5)


def _own_address_towards(address: str) -> str:
    """The address of this machine from which packets to `address` leave."""
    try:
        info = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(info[0], socket.SOCK_DGRAM) as probe:
            probe.connect(info[4])
            return probe.getsockname()[0]
    except OSError as error:
        raise ValueError(
            f"MASTER_ADDR={address} cannot be reached from {socket.gethostname()} ({error}): "
            "give the host name or address of node 0 that the other nodes know"
        ) from error


def _name_interface(own_address: str) -> None:
    """gloo would take the card that the own host name resolves to, often the loopback one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own_address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return


def _check_listening(address: str, port: int) -> None:
    """Raises ValueError when node 0 cannot listen there."""
    with socket.socket(socket.getaddrinfo(address, port)[0][0]) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            remedy = {
                errno.EADDRNOTAVAIL: "MASTER_ADDR must be an address of node 0 itself",
                errno.EADDRINUSE: "another job uses that port: set MASTER_PORT",
            }.get(error.errno, "set MASTER_ADDR and MASTER_PORT")
            raise ValueError(
                f"node 0 cannot listen at {address}:{port} ({error.strerror}): {remedy}"
            ) from error


if __name__ == "__main__":
    sys.exit(main())
