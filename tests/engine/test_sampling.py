"""Inverse-CDF sampling and stop ids: known answers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vipfast import streams
from vipfast.engine.base import Sampling
from vipfast.engine.sampling import sample, stop_ids
from vipfast.errors import NonFiniteError, UsageError


def test_top_p_keeps_the_nucleus_and_records_the_full_distributions_log_probs():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    ids, logp = sample(logits.expand(1000, 4), u, Sampling(1, top_p=0.6))
    # .5 alone does not reach .6, with .3 it does; renormalised to 5/8 and 3/8
    assert torch.bincount(ids, minlength=4).tolist() == [625, 375, 0, 0]
    torch.testing.assert_close(logp, logits[ids], atol=1e-6, rtol=0)
    assert sample(logits.expand(9, 4), u[:9], Sampling(1, top_p=1e-9))[0].tolist() == [0] * 9


def test_sample_never_returns_an_impossible_id_and_inverts_the_cdf():
    inf = float("inf")
    logits = torch.tensor([[-inf, 0.0, -inf, 0.0, -inf]])
    u = torch.tensor([0.0, 0.25, 0.49999, 0.5, 0.75, 1 - 2**-53], dtype=torch.float64)
    ids, logp = sample(logits.expand(6, 5), u, Sampling(1))
    assert ids.tolist() == [1, 1, 1, 3, 3, 3]
    np.testing.assert_allclose(logp, np.log(0.5), rtol=1e-6)
    # a long tail of zeros after a sum that rounds: the last draw still is the last possible id
    torch.manual_seed(0)
    tail = torch.cat([torch.randn(64, 300), torch.full((64, 50), -inf)], 1)
    ids, _ = sample(tail, torch.full((64,), 1 - 2**-53, dtype=torch.float64), Sampling(1))
    assert ids.tolist() == [299] * 64


def test_sampled_shares_match_the_probabilities():
    torch.manual_seed(0)
    logits = torch.randn(7)
    keys = streams.keys(streams.TRAIN, 0, 0, 1, np.arange(20_000))
    ids, _ = sample(logits.expand(20_000, 7), torch.from_numpy(streams.uniforms(keys, 0)), Sampling(1, 0.7))
    p = torch.softmax(logits / 0.7, 0).numpy()
    shares = np.bincount(ids.numpy(), minlength=7) / 20_000
    assert (np.abs(shares - p) < 4.5 * np.sqrt(p * (1 - p) / 20_000)).all()


def test_vocabulary_of_one():
    ids, logp = sample(torch.zeros(3, 1), torch.tensor([0.0, 0.5, 0.999], dtype=torch.float64), Sampling(1))
    assert ids.tolist() == [0, 0, 0] and logp.tolist() == [0, 0, 0]


def test_stop_ids_unite_all_sources():
    class Tokenizer:
        eos_token_id = 7

        def encode(self, text, add_special_tokens):
            assert not add_special_tokens
            return [ord(c) for c in text]

    assert stop_ids(Tokenizer(), SimpleNamespace(eos_token_id=[9, 7]), ("a",)) == (7, 9, 97)
    assert stop_ids(Tokenizer(), SimpleNamespace(eos_token_id=3)) == (3, 7)
    assert stop_ids(SimpleNamespace(eos_token_id=None), None) == ()
    with pytest.raises(UsageError, match="--stop 'ab' is 2 tokens"):
        stop_ids(Tokenizer(), None, ("ab",))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_logit_is_refused_and_counted(bad):
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    with pytest.raises(NonFiniteError, match="1 of 3 rows"):
        sample(logits, torch.full((3,), 0.5, dtype=torch.float64), Sampling(1))
