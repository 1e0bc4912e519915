import math

import pytest

from vipfast.config import Config
from vipfast.learn.schedule import learning_rate


def test_learning_rate_by_hand():
    def at(schedule, *steps):
        config = Config(learning_rate=1.0, steps=10, warmup_steps=2, lr_schedule=schedule)
        return [learning_rate(config, k) for k in steps]

    assert at("constant", 0, 1, 2, 9) == [0.5, 1, 1, 1]
    assert at("linear", 1, 2, 6, 10, 12) == [1, 1, 0.5, 0, 0]
    assert at("cosine", 2, 4, 6, 10) == pytest.approx([1, (1 + math.cos(math.pi / 4)) / 2, 0.5, 0])


def test_more_steps_on_resume_follow_the_new_course():
    config = dict(learning_rate=1.0, lr_schedule="linear")
    assert learning_rate(Config(steps=10, **config), 5) == 0.5 and learning_rate(Config(steps=20, **config), 5) == 0.75


def test_all_warm_up():
    assert [learning_rate(Config(learning_rate=1.0, steps=2, warmup_steps=4), k) for k in range(2)] == [0.25, 0.5]
