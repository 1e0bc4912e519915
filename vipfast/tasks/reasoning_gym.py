"""Procedural tasks of the reasoning-gym library: ``reasoning_gym:chain_sum``, or a mixture ``reasoning_gym:chain_sum*2+gcd``.

The library is run in a process of its own to generate (reasoning_gym_entries.py). Its own scorers grade, in workers; they pay
partial credit. What a scorer needs of a problem is kept in the prompt's metadata, as text.
"""

import ast
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec

import yaml

from vipfast.config import Config
from vipfast.errors import DataError
from vipfast.options.values import REASONING_GYM
from vipfast.rewards.answers import bounded
from vipfast.rewards.base import Verdict
from vipfast.rewards.extract import find, plain
from vipfast.rewards.pool import TIMEOUT_S, Outcome, Pool
from vipfast.tasks.base import Record
from vipfast.types import RewardRange

LONGEST_ANSWER = 20_000
"""Characters; a longer answer is wrong without being read, as scorers were not written for it."""

# Their scorers hand the answer to eval(), which would run what the policy wrote.
_PYTHON = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
_LITERAL = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Name, ast.Load, ast.UnaryOp, ast.USub, ast.UAdd)
# Theirs to sympy.parse_expr, which does the same.
_FORMULA = {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
_FUNCTIONS = "a?(?:sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt|pi|Abs"
_HARMLESS_FORMULA = re.compile(
    rf"(?>(?<![A-Za-z_])(?:[A-Za-z]|{_FUNCTIONS})(?![A-Za-z_])|[0-9]++(?:\.[0-9]++)?|[\s+\-*/^(),])*+", re.ASCII
)


def parse(task: str) -> dict[str, float]:
    """The datasets of ``--task`` and their weights: "reasoning_gym:chain_sum*2+gcd" -> {"chain_sum": 2.0, "gcd": 1.0}.

    Raises:
        DataError: no such spelling.
    """
    weights: dict[str, float] = {}
    for part in task.removeprefix(REASONING_GYM).split("+"):
        found = re.fullmatch(r"\s*([A-Za-z]\w*)\s*(?:\*\s*(\d{1,6}(?:\.\d{1,6})?))?\s*", part)
        weight = float(found.group(2) or 1) if found else 0.0
        if not weight or found.group(1) in weights:
            what = "is there twice" if found and weight else "is no NAME or NAME*WEIGHT with a weight above 0"
            raise DataError(
                f"--task {task}: {part.strip()!r} {what}; write e.g. {REASONING_GYM}chain_sum or {REASONING_GYM}chain_sum*2+gcd"
            )
        weights[found.group(1)] = weight
    return weights


def sizes(weights: dict[str, float], size: int) -> dict[str, int]:
    """Shares of ``size`` by weight in whole numbers (largest remainders), in all exactly ``size``."""
    exact = {name: size * weight / sum(weights.values()) for name, weight in weights.items()}
    counts = {name: int(share) for name, share in exact.items()}
    for name in sorted(exact, key=lambda name: counts[name] - exact[name])[: size - sum(counts.values())]:
        counts[name] += 1
    return counts


def load_records(config: Config, notes: list[str], size: int | None = None) -> list[Record]:
    """Generate the problems of ``config.task``: ``size`` (else ``config.task_size``) from ``config.seed``.

    The same options give the same problems in any process, on any rank.

    Raises:
        DataError: the library is missing, a dataset or setting it does not have (with the nearest name), or a setting it
            refuses.
    """
    weights = parse(config.task)
    if find_spec("reasoning_gym") is None:
        raise DataError(f"--task {config.task}: needs the reasoning-gym library; pip install 'vipfast[tasks]'")
    asked = {
        "task": config.task,
        "sizes": sizes(weights, config.task_size if size is None else size),
        # The library's entry i comes from seed + i: neighbouring seeds would share nearly all problems.
        "seeds": {name: _seed(config.seed, name) for name in weights},
        "options": _options(config.task_options),
    }
    # Some of its datasets loop over sets of texts, whose order is the process's own unless this is set before it starts.
    env = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "vipfast.tasks.reasoning_gym_entries"]
    done = subprocess.run(command, input=json.dumps(asked), stdout=subprocess.PIPE, env=env, text=True, encoding="utf-8")
    if done.returncode or not done.stdout:
        raise DataError(f"--task {config.task}: generating its problems failed (exit code {done.returncode}; see above)")
    answered = json.loads(done.stdout)
    if "error" in answered:
        raise DataError(answered["error"])
    records = [Record(row.pop("question"), row.pop("answer"), row) for row in answered["rows"]]
    without = sum(record.answer is None for record in records)
    if without:
        notes.append(f"{without} of {len(records)} problems have no single right answer; their scorer knows the right ones")
    if num_repeated := answered["repeated"]:
        notes.append(f"{num_repeated} problems came again and were left out: these settings allow no more different ones")
    return records


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()) % 2**31


def _options(text: str | None) -> dict:
    try:
        options = yaml.safe_load(text) if text else {}
        json.dumps(options)
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"--task-options {text!r}: is neither JSON nor YAML ({error})") from error
    if not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
        raise DataError(f"--task-options {text!r}: must be a mapping such as '{{max_terms: 3}}'")
    return options


def extracted(completion: str) -> str | None:
    """What is graded: the answer where ``extract.find`` says, a grid below "Answer:" with all its lines, else the whole text
    outside the thoughts; None where there is no answer, or boxes that differ."""
    found = find(completion)
    if len(found.texts) != 1:
        return None
    answer = found.block or found.texts[0]
    return plain(answer).removesuffix(".") if found.place in ("box", "line") else answer.strip()


class Scorer:
    """The library's own score of each completion, in [0, 1], and the answer it was given for (``rewards.base.Reward``).

    Scores are given in worker processes, since some scorers take long on what a policy may write.

    Args:
        workers: processes that score at a time.
        timeout_s: seconds a score may take, 10 unless given; past it an answer is wrong.
    """

    beside, has_answers, reward_range = True, True, RewardRange(0.0, 1.0)

    def __init__(self, workers: int, timeout_s: float | None = None):
        self.pool = Pool("vipfast.tasks.reasoning_gym:scorer", workers=workers, timeout_s=timeout_s or TIMEOUT_S)

    def close(self) -> None:
        self.pool.close()

    def __call__(self, completions: list[str], answers: list[str | None], metadata: list[dict]) -> list[Verdict]:
        """``answers`` are not read: the metadata, as ``load_records`` wrote it, says what is right."""
        texts = [extracted(completion) for completion in completions]
        asked = [(m["dataset"], m["settings"], m["entry"], text) for text, m in zip(texts, metadata) if text is not None]
        outcomes = iter(self.pool.map(asked))
        return [Verdict(0.0) if text is None else _verdict(next(outcomes), bounded(text)) for text in texts]


def _verdict(outcome: Outcome, answer: str) -> Verdict:
    if outcome.gave_up is not None:
        return Verdict(0.0, answer, timed_out=outcome.gave_up == "time")
    return Verdict(outcome.value, answer, error=outcome.error)


def scorer() -> Callable[[str, str, str, str], float]:
    """The worker's function; the library, which takes seconds to import, is there before the first task's clock runs."""
    import reasoning_gym  # noqa: F401

    return score


def score(dataset: str, settings: str, entry: str, answer: str) -> float:
    """The library's score of one answer, held to [0, 1]; it may take long, so it is made to be called in a worker.

    Args:
        dataset, settings: the dataset's name and, as JSON, its configuration.
        entry: the problem, as Python wrote it (``repr``), since scorers tell tuples from lists.
        answer: what is graded. A text that no scorer should read (too long, or one that would be run as a program) is graded
            as an empty one, and one on which the scorer stumbles gets 0.
    """
    if len(answer) > LONGEST_ANSWER or not _harmless(dataset, answer):
        answer = ""
    try:
        found = float(_dataset(dataset, settings).score_answer(answer, entry=ast.literal_eval(entry)))
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError):
        return 0.0  # e.g. prime_factorization on a word, boxnet on a number
    return min(1.0, max(0.0, found))


def _harmless(dataset: str, answer: str) -> bool:
    if dataset in _FORMULA:
        return bool(_HARMLESS_FORMULA.fullmatch(answer))
    if dataset not in _PYTHON:
        return True
    try:
        parsed = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True  # eval() stops there too
    return all(isinstance(node, _LITERAL) for node in ast.walk(parsed))


@functools.lru_cache(maxsize=256)
def _dataset(name: str, settings: str):
    from reasoning_gym.factory import create_dataset

    return create_dataset(name, **json.loads(settings))
