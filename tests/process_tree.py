"""What runs, as /proc tells."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def _stat(pid: int) -> list[str]:
    """State, parent and so on: the fields behind the name in parentheses."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def state(pid: int) -> str:
    """R, S, T (stopped), Z and so on; empty for a process that is gone."""
    try:
        return _stat(pid)[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Whether it is more than an entry that nobody has waited for."""
    return state(pid) not in ("", "Z", "X")


def below(root: int) -> dict[int, str]:
    """All that descends from a process, with their command lines."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                parents[int(entry.name)] = int(_stat(int(entry.name))[1])
    found, queue = {}, [root]
    while queue:
        parent = queue.pop()
        for pid in [pid for pid, of in parents.items() if of == parent]:
            with suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                queue.append(pid)
    return found


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Raises AssertionError where it does not come to hold."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"waited {timeout_s} s: {what}"
        time.sleep(0.02)
