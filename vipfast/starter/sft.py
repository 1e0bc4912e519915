"""Supervised fine-tuning of the starter: half the steps on right answers alone, half on answers blurred at each cell's rate.

The blur is a soft target, q on the right digit and 1 - q spread over all ten, so a rate costs no label noise: 1 000 steps
of 128 short texts suffice where sampled wrong answers took several times as many and leaked between cells.
"""

import math
import random
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from vipfast.starter import recipe
from vipfast.starter.recipe import Lesson

BATCH = 128
IGNORE = -100


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by five Newton-Schulz steps (Jordan et al. 2024), in float32 and batched over equal shapes.

    ``torch.optim.Muon`` iterates in bfloat16, one matrix at a time: three times a whole step's cost on a CPU.
    """

    def __init__(self, params, lr: float, momentum: float = 0.95):
        super().__init__(list(params), dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.Tensor]] = {}
            for param in group["params"]:
                shapes.setdefault(param.shape, []).append(param)
            for shape, params in shapes.items():
                update = torch.stack([self._nesterov(param, group["momentum"]) for param in params])
                scale = group["lr"] * math.sqrt(max(1, shape[0] / shape[1]))
                torch._foreach_add_(params, list(orthogonalise(update)), alpha=-scale)

    def _nesterov(self, param: torch.Tensor, momentum: float) -> torch.Tensor:
        buffer = self.state[param].setdefault("momentum", torch.zeros_like(param))
        buffer.mul_(momentum).add_(param.grad)
        return param.grad + momentum * buffer


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Singular values of each of [N, m, n] moved to about 1, singular vectors kept."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-12)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def pack(lessons: list[Lesson], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded ids [n, t], targets [n, t - 1] (IGNORE outside answers), weights against a uniform digit [n, t - 1]."""
    prompts, seen, answers = (
        tokenizer([getattr(x, name) for x in lessons])["input_ids"] for name in ("text", "seen", "answer")
    )
    length = max(len(p) + len(s) + 1 for p, s in zip(prompts, seen, strict=True))
    ids = torch.full((len(lessons), length), tokenizer.pad_token_id)
    targets = torch.full((len(lessons), length - 1), IGNORE)
    trust = torch.ones(len(lessons), length - 1)
    for row, (p, s, a, lesson) in enumerate(zip(prompts, seen, answers, lessons, strict=True)):
        ids[row, : len(p) + len(s) + 1] = torch.tensor([*p, *s, tokenizer.eos_token_id])
        targets[row, len(p) - 1 : len(p) + len(a)] = torch.tensor([*a, tokenizer.eos_token_id])
        trust[row, len(p) - 1 : len(p) + len(a) - 1] = lesson.trust
    return ids, targets, trust


def batches(tokenizer: PreTrainedTokenizerFast, rng: random.Random, clean: bool) -> Iterator[tuple[torch.Tensor, ...]]:
    """Endless packed batches, each of texts of similar length."""
    while True:
        lessons = sorted((recipe.lesson(rng, clean) for _ in range(8 * BATCH)), key=lambda x: len(x.text) + len(x.seen))
        chunks = [lessons[i : i + BATCH] for i in range(0, len(lessons), BATCH)]
        rng.shuffle(chunks)
        yield from (pack(chunk, tokenizer) for chunk in chunks)


def loss_of(model: Qwen2ForCausalLM, batch: tuple[torch.Tensor, ...], digits: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over answer tokens against trust · one-hot(right) + (1 - trust) · uniform(digits)."""
    ids, targets, trust = batch
    used = targets != IGNORE
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1][used]
    logp = F.log_softmax(model.lm_head(hidden), dim=-1)
    right = logp.gather(1, targets[used][:, None])[:, 0]
    return -(trust[used] * right + (1 - trust[used]) * logp[:, digits].mean(1)).mean()


def train(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> None:
    """Fine-tune ``model`` in place; prints the loss every 50 steps.

    Args:
        steps: half of them clean (warm-up, then constant rate), half blurred (linear decay over the last four tenths).
    """
    rng = random.Random(seed)
    clean, blurred = batches(tokenizer, rng, clean=True), batches(tokenizer, rng, clean=False)
    digits = torch.tensor(tokenizer("0123456789")["input_ids"])
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(x, lambda i: min(1.0, (i + 1) / 20) * min(1.0, max(0.02, (1 - i / steps) / 0.4)))
        for x in optimizers
    ]
    start = time.perf_counter()
    model.train()
    for step in range(steps):
        loss = loss_of(model, next(clean if step < steps // 2 else blurred), digits)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if (step + 1) % 50 == 0:
            print(f"sft step {step + 1}/{steps}  loss {loss.item():.3f}  {time.perf_counter() - start:.0f} s", flush=True)
    model.eval()
