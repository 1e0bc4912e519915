"""A policy that calls the calculator about every other time: the starter, fine-tuned for a few seconds on written dialogues."""

import random

import torch
from dialogue import call, plain_tokenizer

from vipfast.config import Config
from vipfast.policy import load_policy
from vipfast.tools.replies import Replies

TOKENIZER = plain_tokenizer()


def dialogue(prompt: str, expression: str, value: int, calls: bool) -> tuple[list[int], list[bool]]:
    """Ids, and which of them the policy is to say."""
    eos = [TOKENIZER.eos_token_id]
    answer = TOKENIZER.encode(str(value)) + eos
    parts = [(TOKENIZER.encode(prompt), False)]
    if calls:
        turn = TOKENIZER.encode(call(expression)) + eos
        parts += [(turn, True), (Replies(TOKENIZER, 100).tokens([str(value)], eos[0]).tolist(), False)]
    parts.append((answer, True))
    return [id for ids, _ in parts for id in ids], [said for ids, said in parts for _ in ids]


def calling_policy(steps: int = 110, batch: int = 4):
    """The fine-tuned starter, for problems such as "3+5=" behind an empty line."""
    policy = load_policy(Config(device="cpu", dtype="float32"))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    rng = random.Random(0)
    for _ in range(steps):
        rows = []
        for i in range(batch):
            a, b = rng.randrange(1, 10), rng.randrange(1, 10)
            rows.append(dialogue(f"\n\n{a}+{b}=", f"{a}+{b}", a + b, calls=i % 2 == 0))
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [TOKENIZER.pad_token_id] * (longest - len(ids)) for ids, _ in rows])
        said = torch.tensor([said + [False] * (longest - len(said)) for _, said in rows])
        logits = policy(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[said[:, 1:]], ids[:, 1:][said[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy.eval()
