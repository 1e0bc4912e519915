"""The learning rate of a step."""

import math

from vipfast.config import Config


def learning_rate(config: Config, step: int) -> float:
    """Learning rate of a step (counted from 0), from the step alone, so a resumed run with more steps follows the new course.

    Linear warm-up that reaches the peak at the last warm-up step, then constant, or linear or cosine towards 0 at config.steps.
    """
    peak = config.learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    done = min((step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1), 1.0)
    return peak * _SCHEDULES[config.lr_schedule](done)


_SCHEDULES = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}
