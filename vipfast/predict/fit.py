"""The Gaussian posterior over a window of observed prompts, each binomial stood in for by a site (expectation propagation).

With K the window's prior covariance, T = diag(site precisions t), S = sqrt T and B = I + S K S, whose eigenvalues are at least
1: the weights are alpha = nu - S B^-1 S K nu, and P = (K + T^-1)^-1 = S B^-1 S. What all other prompts say of one, its cavity,
is N(nu/t - alpha/P_ii, 1/P_ii - 1/t). (Rasmussen and Williams, Gaussian Processes for Machine Learning, 3.6 and 5.4.2.)
"""

from dataclasses import dataclass

import numpy as np

from vipfast.predict.covariance import LINEAR, LOCAL, OWN, covariance, prior_variance, text_parts
from vipfast.predict.kernel import Factor
from vipfast.predict.logit import condition
from vipfast.predict.window import LEAST_VARIANCE, Window

AMPLITUDES = (4.0, 1.0, 1.0)
"""Prior medians of the variance that linear, local and own part give a logit."""
AMPLITUDE_SPREAD = 1.5
"""Prior standard deviation of the logarithm of each."""
AMPLITUDE_RANGE = (0.05, 100.0)
LONGEST_STEP = 0.5
"""Largest change of a log amplitude in a step of training."""
FEWEST_ROWS = 16
"""Amplitudes stay where they are until that many prompts are in the window."""
DAMPING = 0.8
"""Share of the way a site moves in a sweep; the whole way can oscillate."""


@dataclass(frozen=True, eq=False)
class Sites:
    """The window's W rows: embeddings, centred and scaled, and the Gaussian evidence of each row's counts."""

    X: np.ndarray  # float64 [W, D]
    natural: np.ndarray  # float64 [W], nu
    precision: np.ndarray  # float64 [W], t > 0

    def __len__(self) -> int:
        return len(self.natural)


class Fit:
    """The posterior given sites and amplitudes: a pure function of them, so that a resumed run has the same bits.

    Args:
        sites: W >= 1 rows.
        amplitudes: float64 [3], the variances of linear, local and own part.
        parts: ``text_parts`` of the rows, where they are known already.
    """

    def __init__(self, sites: Sites, amplitudes: np.ndarray, parts: tuple[np.ndarray, np.ndarray] | None = None):
        self.sites, self.amplitudes = sites, amplitudes
        self.parts = text_parts(sites.X, sites.X) if parts is None else parts
        K = covariance(*self.parts, amplitudes)
        np.fill_diagonal(K, prior_variance(sites.X, amplitudes))
        self.root_W = np.sqrt(sites.precision)
        pulled_W = self.root_W * (K @ sites.natural)
        K *= self.root_W
        K *= self.root_W[:, None]
        K[np.diag_indices_from(K)] += 1.0
        self.factor = Factor(K)
        self.weight_W = sites.natural - self.root_W * self.factor.solve(pulled_W)

    @property
    def window(self) -> Window:
        """What planning needs of it."""
        sites = self.sites
        return Window(sites.X, sites.natural, sites.precision, self.weight_W, self.factor.lower, self.amplitudes)

    def improved(self, k_W: np.ndarray, n_W: np.ndarray, shift_W: np.ndarray) -> "Fit":
        """One sweep: every site anew from its cavity and its counts (as for ``logit.condition``), amplitudes a step uphill."""
        inverse = self.factor.inverse()
        kept_W, nu_W, t_W = np.diag(inverse), self.sites.natural, self.sites.precision
        variance_W = np.maximum((1 / kept_W - 1) / t_W, LEAST_VARIANCE)
        mean_W = (nu_W - self.weight_W / kept_W) / t_W
        fresh = condition(mean_W, variance_W, k_W, n_W, shift_W)
        natural_W = nu_W + DAMPING * (fresh.natural_B - nu_W)
        precision_W = t_W + DAMPING * (fresh.precision_B - t_W)
        amplitudes = self._uphill(inverse) if len(self.sites) >= FEWEST_ROWS else self.amplitudes
        return Fit(Sites(self.sites.X, natural_W, precision_W), amplitudes, self.parts)

    def _uphill(self, inverse: np.ndarray) -> np.ndarray:
        """Amplitudes after a step of average-information scoring on log evidence + log prior.

        At a fixed point of the sweeps the gradient of the evidence is that with sites held fixed: with D = dK / d log a of one
        amplitude, (alpha.D alpha - tr P D) / 2; the average information of two is (D alpha).P (D' alpha) / 2.
        """
        a, alpha_W = self.amplitudes, self.weight_W
        inverse *= self.root_W
        inverse *= self.root_W[:, None]
        P, (dot, local) = inverse, self.parts
        traces, moved = np.empty(3), np.empty((3, len(alpha_W)))
        traces[[LINEAR, LOCAL, OWN]] = np.vdot(P, dot), np.vdot(P, local), np.trace(P)
        moved[LINEAR], moved[LOCAL], moved[OWN] = dot @ alpha_W, local @ alpha_W, alpha_W
        moved *= a[:, None]
        away = np.log(a / AMPLITUDES) / AMPLITUDE_SPREAD**2
        slope = 0.5 * (moved @ alpha_W - a * traces) - away
        information = 0.5 * moved @ P @ moved.T + np.eye(3) / AMPLITUDE_SPREAD**2
        step = np.clip(np.linalg.solve(information, slope), -LONGEST_STEP, LONGEST_STEP)
        return np.clip(a * np.exp(step), *AMPLITUDE_RANGE)
