"""Run code on a machine without Landlock, or without system call filters, which a filter of ours plays for it.

``python without.py landlock,seccomp CODE``
"""

import ctypes
import platform
import struct
import sys


class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def take_away(parts: list[str]) -> None:
    """From here on landlock_create_ruleset says ENOSYS, prctl(PR_SET_SECCOMP) EINVAL."""
    prctl = 157 if platform.machine() == "x86_64" else 167
    load, same, end, allow = 0x20, 0x15, 0x06, 0x7FFF0000
    code = []
    if "landlock" in parts:
        code += [(load, 0, 0, 0), (same, 0, 1, 444), (end, 0, 0, 0x00050000 | 38)]
    if "seccomp" in parts:
        code += [(load, 0, 0, 0), (same, 0, 3, prctl), (load, 0, 0, 16), (same, 0, 1, 22), (end, 0, 0, 0x00050000 | 22)]
    code.append((end, 0, 0, allow))
    text = b"".join(struct.pack("=HBBI", *line) for line in code)
    libc = ctypes.CDLL(None)
    libc.prctl(38, 1, 0, 0, 0)
    assert libc.prctl(22, 2, ctypes.byref(Filter(len(code), text)), 0, 0) == 0


if __name__ == "__main__":
    take_away(sys.argv[1].split(","))
    exec(sys.argv[2])
