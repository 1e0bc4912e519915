"""What grading costs, and that nothing of it piles up.

    python benchmarks/rewards.py [--answers 1000] [--programs 200] [--smoke]

Maths: answers in the shares a training run has them (plain numbers most of all, formulas, and a few that are hostile) against
their golds, by ``vipfast.rewards.maths.Maths`` with one and with two workers, beside math-verify called in this process as its
documentation has it (``parse`` and ``verify``, with their time limits of 5 s), on the same answers but those it hangs on. Each
side sees every pair once: no group of rollouts agrees, so nothing is answered from what is remembered.

``answers_per_s``: with two workers, once they are warm; ``start_s``: until they are. ``vs_inline_1``, ``vs_inline_2``: times
as fast as math-verify in-process, on the answers that both saw. ``resident_mb``: the workers together, before the hostile ones;
``leaked_children``, ``leaked_handles``: processes and file descriptors of this process after closing, less those before.

Programs: five tests each, in the sandbox (reward_programs.py says what its keys mean).
"""

import argparse
import json
import time

import numpy as np
import psutil
from common import append_results, print_table
from reward_programs import programs

HOSTILE = (r"10^{10^{10}}", "(9!)!", r"\sum_{k=1}^{1000000000}k", "9" * 100_000, "(" * 200 + "5" + ")" * 200)
HANGING = (("x=1", r"x^{9}+\sqrt{x}+\sin x=3"),)
TIMEOUT_S = 2.0


def cases(num: int, seed: int = 0) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(gold, answer) pairs that anything can grade, and hostile ones (5 % of all); about half of the former are right."""
    rng = np.random.default_rng(seed)
    kinds = (
        (0.35, lambda a, b: (str(a), str(a + b % 2))),
        (0.10, lambda a, b: (str(a), rf"{a + b % 2}\text{{ dollars}}")),
        (0.15, lambda a, b: (f"{a}/{b + 2}", rf"\frac{{{a + b % 2}}}{{{b + 2}}}")),
        (0.10, lambda a, b: (rf"\sqrt{{{a}}}", rf"\frac{{{a}}}{{\sqrt{{{a + b % 2}}}}}")),
        (0.10, lambda a, b: (f"x^2+{2 * b}x+{b * b}", f"(x+{b + a % 2})^2")),
        (0.10, lambda a, b: (f"({a},{b})", rf"\left({a}, {b + a % 2}\right)")),
        (0.10, lambda a, b: (rf"\{{{a},{b}\}}", rf"\{{{b},{a + b % 2}\}}")),
    )
    picked = rng.choice(len(kinds), num - num // 20, p=[share for share, _ in kinds])
    # Distinct first numbers, so that no two pairs are the same.
    plain = [kinds[kind][1](10 + i, int(rng.integers(1, 50))) for i, kind in enumerate(picked)]
    hostile = [(str(5 + i), HOSTILE[i % len(HOSTILE)]) for i in range(num // 20 - len(HANGING))]
    return plain, [*hostile, *HANGING]


def inline(pairs: list[tuple[str, str]]) -> float:
    """Seconds of math-verify in this process."""
    from math_verify import parse, verify

    start = time.perf_counter()
    for gold, answer in pairs:
        verify(parse(f"${gold}$"), parse(rf"\boxed{{{answer}}}"))
    return time.perf_counter() - start


def maths(num: int) -> tuple[dict, list[tuple]]:
    """The maths half: JSON keys, and a table."""
    from vipfast.rewards.maths import Maths

    plain, hostile = cases(num)
    inline(plain[:20])  # builds its grammar
    inline_s = inline(plain)
    own, seconds, rows = psutil.Process(), {}, [("", "answers/s", "times in-process", "start s", "MB", "hostile s")]
    rows.append(("math-verify in-process", f"{len(plain) / inline_s:.0f}", "1", "", "", "hangs"))
    resident_mb = start_s = hostile_s = 0.0
    for workers in (1, 2):
        start = time.perf_counter()
        reward = Maths(workers=workers, timeout_s=TIMEOUT_S)
        _graded(reward, plain[:20])
        start_s = time.perf_counter() - start
        seconds[workers] = _graded(reward, plain)
        resident_mb = sum(child.memory_info().rss for child in own.children(recursive=True)) / 1e6
        hostile_s = _graded(reward, hostile)
        reward.close()
        rate, ratio = len(plain) / seconds[workers], inline_s / seconds[workers]
        rows.append(
            (f"workers: {workers}", f"{rate:.0f}", f"{ratio:.2f}", f"{start_s:.1f}", f"{resident_mb:.0f}", f"{hostile_s:.1f}")
        )
    result = {
        "answers_per_s": round(num / (seconds[2] + hostile_s), 1),
        "vs_inline_1": round(inline_s / seconds[1], 2),
        "vs_inline_2": round(inline_s / seconds[2], 2),
        "start_s": round(start_s, 2),
        "resident_mb": round(resident_mb, 1),
    }
    return result, rows


def _graded(reward, pairs: list[tuple[str, str]]) -> float:
    """Seconds to grade pairs as a run does: some at a time."""
    start = time.perf_counter()
    for first in range(0, len(pairs), 64):
        golds, answers = zip(*pairs[first : first + 64])
        reward([rf"So it is \boxed{{{answer}}}." for answer in answers], list(golds), [{}] * len(golds))
    return time.perf_counter() - start


def held() -> tuple[int, int]:
    """Child processes and file descriptors of this process."""
    own = psutil.Process()
    return len(own.children(recursive=True)), own.num_fds()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--smoke", action="store_true", help="few answers, nothing kept")
    args = parser.parse_args()
    num, num_programs = (40, 20) if args.smoke else (args.answers, args.programs)
    before = held()
    result, rows = maths(num)
    print_table(f"maths: {num} answers, {num // 20} of them hostile", rows)
    programs_result = programs(num_programs)
    print_table(f"code: {num_programs} programs", list(programs_result.items()))
    result |= programs_result
    children, handles = held()
    result |= {"leaked_children": children - before[0], "leaked_handles": handles - before[1]}
    append_results("rewards", result, smoke=args.smoke)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
