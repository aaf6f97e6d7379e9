"""Where a process listens for TCP, as the kernel has it."""

import ipaddress
import os
from contextlib import suppress
from pathlib import Path


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses ("::" for every one) and ports."""
    sockets = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                sockets.add(os.readlink(entry.path))
    found = set()
    for line in [*Path("/proc/net/tcp").read_text().splitlines(), *Path("/proc/net/tcp6").read_text().splitlines()]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
            address, _, port = words[1].rpartition(":")
            found.add((str(decoded(address)), int(port, 16)))
    return found


def decoded(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as the kernel writes it: hexadecimal words of four bytes, the lowest first."""
    words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
    found = ipaddress.ip_address(b"".join(words))
    return getattr(found, "ipv4_mapped", None) or found
