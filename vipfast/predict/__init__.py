"""How likely each prompt is to be solved: ``gp`` (logit GP with count noise) or ``vip`` (the paper's), behind one protocol."""

from collections.abc import Sequence

from vipfast.errors import UsageError
from vipfast.predict.base import Predictor
from vipfast.predict.embed import Embedder
from vipfast.predict.gp import GP
from vipfast.predict.paper import PaperGP


def make_predictor(name: str, pool_texts: Sequence[str]) -> Predictor:
    """The predictor of ``--predictor``, over MiniLM embeddings. Nothing is embedded or loaded before the first prediction.

    Raises:
        UsageError: there is no such predictor.
    """
    predictors = {"gp": GP, "vip": PaperGP}
    if name not in predictors:
        raise UsageError(f"--predictor {name}: must be one of {', '.join(predictors)}")
    return predictors[name](Embedder(), pool_texts)
