"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_bytes() -> int | None:
    """Bytes that can be taken before the kernel kills for memory: of the host and of its container; None if unknown."""
    known = []
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            known.append(1024 * int(line.split()[1]))
    for limit, used in _CGROUPS:
        numbers = [_text(path).strip() for path in (limit, used)]
        if all(number.isdecimal() for number in numbers):
            known.append(int(numbers[0]) - int(numbers[1]))
    return max(0, min(known)) if known else None


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
