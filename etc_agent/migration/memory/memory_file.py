"""Anonymous memory (memfd) that workers of one host share; unlike /dev/shm it has no size limit of its own."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from etc_agent.migration.memory.pages import Mapped

DESCRIPTION_BYTES = 256


def can_share() -> bool:
    """Whether this system has anonymous memory files."""
    return hasattr(os, "memfd_create")


class MemoryFile:
    """`size` bytes, mapped here, which processes of the same host and user can map too until `close`. The memory lives
    as long as anything that was made from `memory`, here or in a peer.

    Raises:
        OSError: there is not enough memory, or no file descriptor.
    """

    def __init__(self, size: int) -> None:
        self._fd = -1
        self._fd = os.memfd_create("etc-run-state", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        self.memory = Mapped(size, self._fd)

    def place(self) -> str:
        """What a peer needs in order to find this memory."""
        stat = os.fstat(self._fd)
        return f"{os.getpid()} {self._fd} {stat.st_dev} {stat.st_ino} {stat.st_size}"

    def close(self) -> None:
        """No peer can map this memory any more. Existing mappings stay."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def describe(file: MemoryFile | None) -> bytes:
    """How a peer finds this worker's host and memory, in at most `DESCRIPTION_BYTES`. Empty, which means that this
    worker does not share, where no file descriptor is left to find that out."""
    try:
        return f"{_host_identity()} {file.place() if file else ''}".encode()
    except OSError:
        return b""


def host_of(described: bytes) -> str:
    """Identifies workers that can map each other's memory: equal strings. "" for a worker that has described none."""
    return described.rstrip(b"\0").decode().partition(" ")[0]


def map_described(described: bytes) -> ctypes.Array[ctypes.c_char] | None:
    """Map the memory that a peer described; None where the peer is on another host, of another user, or gone."""
    fields = described.rstrip(b"\0").decode().split()
    if len(fields) != 6:
        return None
    pid, fd, device, inode, size = map(int, fields[1:])
    try:
        if fields[0] != _host_identity():
            return None
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        stat = os.fstat(opened)
        # By now the same descriptor number may be another file, and the same pid another process.
        if (stat.st_dev, stat.st_ino, stat.st_size) != (device, inode, size):
            return None
        return Mapped(size, opened).part(0, size, gives_back=False)
    except OSError:
        return None
    finally:
        os.close(opened)


def _host_identity() -> str:
    """Identifies this boot of this host, and what decides whether one process can see another: pid namespace and
    user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}:{os.getuid()}"
