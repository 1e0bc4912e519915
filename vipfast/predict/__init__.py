"""How likely each prompt is to be solved: ``gp``, ``kernel_beta``, ``beta`` or ``vip`` (the paper's), behind one protocol."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vipfast.errors import UsageError
from vipfast.predict.base import Predictor
from vipfast.predict.beta import Beta
from vipfast.predict.embed import Embedder
from vipfast.predict.gp import GP
from vipfast.predict.kernel_beta import KernelBeta
from vipfast.predict.paper import PaperGP

PREDICTORS = ("gp", "kernel_beta", "beta", "vip")


def make_predictor(name: str, pool: Sequence[tuple[str, str]], arrays: Any = np) -> Predictor:
    """The predictor of ``--predictor``, over MiniLM embeddings. Nothing is embedded or loaded before the first prediction.

    Args:
        pool: (uid, text) of every prompt that may be planned.
        arrays: numpy, or cupy for a gp that predicts on the GPU; the others need nothing of the kind.

    Raises:
        UsageError: there is no such predictor.
    """
    uids, texts = [uid for uid, _ in pool], [text for _, text in pool]
    match name:
        case "gp":
            return GP(Embedder(), texts, uids, arrays=arrays)
        case "kernel_beta":
            return KernelBeta(Embedder(), texts, uids)
        case "beta":
            return Beta(uids)
        case "vip":
            return PaperGP(Embedder(), texts, uids)
    raise UsageError(f"--predictor {name}: must be one of {', '.join(PREDICTORS)}")
