"""The hostile programs of tests/data, and something for them to attack: a trainer's folder, ports that listen, a secret."""

import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

CORPUS = [json.loads(line) for line in (Path(__file__).parent / "data" / "hostile_programs.jsonl").read_text().splitlines()]
"""Per line: name, program, kind with input and output, and what must come of it: ended, reward, and within how many seconds."""
SECRET = "secret-1729"


class Prey:
    """What the programs attack. ``unharmed`` tells whether none of it was touched."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="prey-"))
        self.folder.chmod(0o777)
        self.mark = f"written-by-{self.folder.name}"
        (self.folder / "answers").write_text(SECRET)
        (self.folder / "answers").chmod(0o666)
        os.environ["HF_TOKEN"] = SECRET
        self.sockets = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)]
        self.port = self.sockets[0].getsockname()[1]
        self.sockets[1].bind(("127.0.0.1", self.port))
        self.abstract = f"prey-{os.getpid()}"
        self.sockets += [socket.socket(socket.AF_UNIX, kind) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)]
        self.sockets[2].bind(f"\0{self.abstract}")
        self.sockets[2].listen()
        self.sockets[3].bind(f"\0{self.abstract}-datagram")
        for listening in self.sockets:
            listening.setblocking(False)
        self.stat = self._stat()

    def bait(self, program: str) -> str:
        """The program, with the addresses it attacks."""
        for name, value in {
            "PID": os.getpid(), "PORT": self.port, "ABSTRACT": self.abstract, "OUTSIDE": self.folder, "MARK": self.mark,
        }.items():  # fmt: skip
            program = program.replace(f"@{name}@", str(value))
        return program

    def _stat(self) -> tuple:
        stat = (self.folder / "answers").stat()
        return stat.st_mode, stat.st_uid, stat.st_size, stat.st_mtime_ns, stat.st_nlink

    def unharmed(self) -> bool:
        written = [Path(place) / self.mark for place in ("/tmp", "/dev/shm", "/var/tmp", self.folder)]
        for listening in self.sockets:
            with contextlib.suppress(BlockingIOError):
                listening.accept() if listening.type == socket.SOCK_STREAM else listening.recv(1)
                return False
        return not any(path.exists() for path in written) and self._stat() == self.stat

    def close(self) -> None:
        del os.environ["HF_TOKEN"]
        for listening in self.sockets:
            listening.close()
        (self.folder / "answers").unlink()
        self.folder.rmdir()


def attack(sandbox, prey: Prey, row: dict):
    """Run a line of the corpus. Returns its output and the seconds it took."""
    from vipfast.sandbox import Limits

    start, limits = time.monotonic(), Limits(wall_s=row["limit_s"], memory_mb=512)
    program, given = prey.bait(row["program"]), row["input"]
    if row["kind"] == "stdin":
        output = sandbox.run(program, stdin=given, limits=limits)
    else:
        output = sandbox.run(program, function=row["function"], arguments=given, limits=limits)
    return output, time.monotonic() - start


def main() -> None:
    """Become a user without rights, run what is not about time or output, and print what ended otherwise than it must."""
    os.setgroups([])
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))
    from vipfast.sandbox import Sandbox

    sandbox, prey = Sandbox("strict", workers=1), Prey()
    wrong = []
    for row in CORPUS:
        if row["ended"] in ("time", "output") and "fork" not in row["name"]:
            continue
        output, seconds = attack(sandbox, prey, row)
        if output.ended != row["ended"] or seconds > row["seconds"] or not prey.unharmed():
            wrong.append((row["name"], output.ended, seconds, prey.unharmed(), output.stdout[:200], output.stderr[-400:]))
    sandbox.close()
    prey.close()
    print(json.dumps({"note": sandbox.note, "wrong": wrong}))


if __name__ == "__main__":
    main()
