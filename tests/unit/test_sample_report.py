"""The figures of each sample, against sums by numpy."""

import numpy as np
import pytest
import torch

from swarm.rl.sample_report import ESTIMATORS, RATIO_EDGES, divergences, ratio_edges

LOG_RATIO = [[0.5, -0.25, 0.0, 0.0], [-3.0, 1.2, 0.8, -0.1], [0.0, 0.0, 0.0, 0.0]]
LENGTHS = [2, 4, 3]


def test_figures_of_each_sample() -> None:
    mask = torch.arange(4) < torch.tensor(LENGTHS)[:, None]
    edges = (1.0, 1.5, 2.5)
    found = divergences(torch.tensor(LOG_RATIO), mask, edges)
    for row, length, figures in zip(LOG_RATIO, LENGTHS, found, strict=True):
        x = np.array(row[:length])
        expected = {
            "grpo": (np.exp(-x) - 1 + x).sum(),
            "k3": (np.exp(x) - 1 - x).sum(),
            "k1": -x.sum(),
            "reverse": (1 - np.exp(x) + x * np.exp(x)).sum(),
        }
        assert figures.kl == pytest.approx(expected, abs=1e-6)
        assert figures.ratio_mean == pytest.approx(np.exp(x).mean(), abs=1e-6)
        assert figures.ratio_max == pytest.approx(np.exp(x).max(), abs=1e-6)
        assert figures.tokens_above == tuple(int((np.exp(x) > edge).sum()) for edge in edges)
    assert found[1].tokens_above == (2, 2, 1)


def test_every_estimator_is_among_them() -> None:
    assert set(ESTIMATORS) == {"grpo", "k3", "k1", "reverse"}


def test_the_configured_truncation_is_an_edge() -> None:
    assert ratio_edges(2.0) == RATIO_EDGES
    assert ratio_edges(1.7) == tuple(sorted((*RATIO_EDGES, 1.7)))
