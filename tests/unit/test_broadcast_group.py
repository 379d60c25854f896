"""The group of a broadcast alone: where it can be reached."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shared.transfer.group import BroadcastGroup, GroupFailed, address_towards
from tests.deadline import DEADLINE_S

CPU = torch.device("cpu")
_LISTEN = "0A"


def addresses() -> list[str]:
    """Of both loopbacks, and of the network, where there are such."""
    found = ["127.0.0.1"]
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        found.append("::1")
    # Of a network that nobody has: the way there leads through the machine's own one.
    with contextlib.suppress(OSError):
        found.append(address_towards("198.51.100.1"))
    return found


def listening() -> set[tuple[str, str]]:
    """(address, inode) of this process's sockets that wait for connections."""
    mine = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTEN and f"socket:[{inode}]" in mine:
                digits = local.partition(":")[0]
                # Words of 32 bits, each in the machine's order.
                words = struct.unpack(f">{len(digits) // 8}I", bytes.fromhex(digits))
                found.add((str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))), inode))
    return found


@pytest.mark.parametrize("address", addresses())
def test_a_member_listens_on_the_interface_that_leads_to_the_store_and_on_no_other(address: str) -> None:
    before = listening()
    group = BroadcastGroup(
        dist.HashStore(), store_host=address, epoch=1, rank=0, size=1, device=CPU, timeout_s=DEADLINE_S
    )
    new = {where for where, _ in listening() - before}
    group.close()
    assert new == {address}


def test_a_store_that_no_interface_leads_to_fails_the_group_and_not_the_process() -> None:
    with pytest.raises(GroupFailed, match="no group of 1 members"):
        BroadcastGroup(
            dist.HashStore(), store_host="not a host", epoch=1, rank=0, size=1, device=CPU, timeout_s=DEADLINE_S
        )
