"""pass@k against enumeration, maj@k by hand, and nulls where nothing is defined."""

from itertools import combinations

import numpy as np
import pytest

from vipfast.engine.base import Finished
from vipfast.evaluate import evaluate, pass_at_k
from vipfast.rewards.base import Verdict
from vipfast.rewards.grader import Grader
from vipfast.types import Finish, Prompt


@pytest.mark.parametrize("n,c,k", [(n, c, k) for n in (1, 4, 6) for c in range(n + 1) for k in range(1, n + 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, c, k):
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(np.mean([any(s) for s in subsets]))


class Canned:
    """Returns given texts (as one-token rollouts) per prompt and sample."""

    name = "canned"

    def __init__(self, texts):
        self.texts, self.rows = texts, []

    pending = property(lambda self: len(self.rows))

    def submit(self, requests):
        for r in requests:
            self.rows += [(r.slot, int(r.uid), i) for i in range(r.first_index, r.first_index + r.count)]

    def step(self):
        rows, self.rows = self.rows, []
        logp = np.zeros(1, np.float32)
        return [Finished(slot, i, np.array([uid * 10 + i]), logp, Finish.STOP) for slot, uid, i in rows]

    def reset(self):
        pass

    def batch_decode(self, tokens, skip_special_tokens):
        return [self.texts[int(t[0]) // 10][int(t[0]) % 10] for t in tokens]


def run(texts, answers, extract=str.strip, k=4, rows_at_once=99):
    engine = Canned(texts)

    def reward(completions, answers, metadata):
        found = [extract(text) if extract else None for text in completions]
        return [Verdict(float(text.strip() == gold), answer) for text, gold, answer in zip(completions, answers, found)]

    reward.has_answers = extract is not None
    grader = Grader(reward, engine)
    prompts = [Prompt(str(i), str(i), np.array([1]), answer) for i, answer in enumerate(answers)]
    return evaluate(prompts, engine, grader, k, rows_at_once=rows_at_once)


@pytest.mark.parametrize("rows_at_once", [99, 8, 4, 1])
def test_scores_by_hand_however_many_rows_fit(rows_at_once):
    texts = [["7", "7", "8", "9"], ["5", "6", "6", "6"], ["1", "2", "1", "2"]]
    scores = run(texts, ["7", "5", "1"], rows_at_once=rows_at_once)
    assert scores["eval/mean@4"] == pytest.approx((2 + 1 + 2) / 12)
    assert scores["eval/pass@4"] == 1.0
    assert scores["eval/maj@4"] == pytest.approx(2 / 3)  # the tie 1-2 goes to the answer sampled first


def test_no_extractor_means_no_majority():
    assert run([["7"] * 4], ["7"], extract=None)["eval/maj@4"] is None


def test_unextractable_answers_have_no_vote():
    scores = run([["7", "?", "?", "?"], ["?"] * 4], ["7", "7"], extract=lambda text: None if text == "?" else text)
    assert scores["eval/maj@4"] == 0.5


def test_no_heldout_prompts_gives_nulls():
    scores = run([], [])
    assert [scores[f"eval/{name}@4"] for name in ("mean", "pass", "maj")] == [None] * 3
