"""How fast the code reward grades, and whether it leaves anything: a part of benchmarks/rewards.py."""

import time

import psutil

from vipfast.rewards.code import Code

SORTS = "import sys\nprint(*sorted(map(int, sys.stdin.read().split())))"
PROGRAMS = (
    (SORTS, 1.0, 14),
    ("def main():\n    print(*sorted(input().split()))\nmain()", 0.0, 3),  # as texts: 10 before 9
    ("print(*sorted(map(int, input().split()))", 0.0, 1),  # no Python
    ("import os\nprint(0)\nos._exit(0)", 0.0, 1),
    ("while True:\n    print('x' * 1000)", 0.0, 1),
)
"""Source, reward and how many of every 20: most are right, as late in training, and right ones run every test."""


def programs(num: int = 200, num_tests: int = 5, workers: int | None = None) -> dict:
    """Grade ``num`` programs of ``num_tests`` tests each, after a first few that start the servers.

    Returns:
        ``programs_per_s``, ``runs_per_s`` (one a test, in a process of its own), ``programs_wrong`` (verdicts that are not the
        right ones), ``server_mb`` (largest resident memory of a server), ``program_children`` and ``program_handles`` (more
        of this process's than after the first few), ``program_left`` (processes once closed).
    """
    own = psutil.Process()
    before = len(own.children(recursive=True))
    tests = [
        {"input": " ".join(map(str, range(9 + n, n, -1))), "output": " ".join(map(str, range(n + 1, 10 + n)))}
        for n in range(num_tests)
    ]
    mix = [(f"```python\n{source}\n```", right) for source, right, share in PROGRAMS for _ in range(share)]
    rows = [mix[i % len(mix)] for i in range(num)]
    reward = Code(workers=workers, timeout_s=10.0)

    def grade(rows: list) -> list:
        return [
            v.reward
            for v in reward([text for text, _ in rows], [None] * len(rows), [{"kind": "stdin", "tests": tests}] * len(rows))
        ]

    grade(rows[:20])
    children, handles = len(own.children(recursive=True)), own.num_fds()
    start = time.perf_counter()
    rewards = grade(rows)
    seconds = time.perf_counter() - start
    grown = {
        "program_children": len(own.children(recursive=True)) - children,
        "program_handles": own.num_fds() - handles,
        "server_mb": round(max(child.memory_info().rss for child in own.children()) / 2**20, 1),
    }
    runs = sum(num_tests if right else 1 for _, right in rows)
    reward.close()
    return {
        "programs_per_s": round(num / seconds, 1),
        "runs_per_s": round(runs / seconds, 1),
        "programs_wrong": sum(got != right for got, (_, right) in zip(rewards, rows)),
        **grown,
        "program_left": len(own.children(recursive=True)) - before,
    }
