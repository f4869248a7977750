"""Wilson's interval against published values."""

import pytest

from swarm.intervals import wilson, with_interval


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [  # Newcombe (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 1 - 0.1611, 1.0),
    ],
)
def test_published_values(right: int, total: int, low: float, high: float) -> None:
    assert wilson(right / total, total) == pytest.approx((low, high), abs=5e-5)


def test_shown() -> None:
    assert with_interval(81 / 263, 263) == "0.308 [0.255, 0.366]"


@pytest.mark.parametrize(("share", "total"), [(0.5, 0), (1.1, 3), (-0.1, 3)])
def test_no_share(share: float, total: int) -> None:
    with pytest.raises(ValueError, match="expected a share"):
        wilson(share, total)
