"""How sure a share is that was counted: Wilson's score interval.

Owns: the formula and how it is shown. Does not know: what was counted.
"""

import math

Z_95 = 1.959964
"""Two-sided 95 %."""


def wilson(share: float, total: int) -> tuple[float, float]:
    """The 95 % interval of a share of `total` independent tries (Wilson 1927).

    Unlike the normal approximation it stays within [0, 1] and is right near 0 and 1.

    Raises:
        ValueError: no tries, or no share.
    """
    if total < 1 or not 0.0 <= share <= 1.0:
        raise ValueError(f"expected a share in [0, 1] of at least one try: {share} of {total}")
    spread = Z_95 * math.sqrt(share * (1 - share) / total + Z_95**2 / (4 * total**2))
    middle, scale = share + Z_95**2 / (2 * total), 1 + Z_95**2 / total
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def with_interval(share: float, total: int) -> str:
    """As people read it: 0.312 [0.253, 0.378]."""
    low, high = wilson(share, total)
    return f"{share:.3f} [{low:.3f}, {high:.3f}]"
