"""How long workers wait for the slowest of them.

A step ends when the last worker has its gradients. If one worker's compute varies from step to step with a deviation s,
normally and for each by itself, the slowest of P is E[max of P normals] s behind the mean: so long do others wait on average.
"""

import functools
import math


@functools.cache
def expected_lag(workers: int) -> float:
    """How many deviations the slowest of so many workers is expected to lie behind the mean: E[max of P normals].

    The integral of (1 - F^P) above 0 less that of F^P below, F being the normal distribution; 0, 0.564, 0.846, 1.029, ...
    """
    if workers < 2:
        return 0.0
    step = 0.005
    total = 0.0
    for i in range(1, round(9 / step)):  # beyond 9 deviations nothing is left, for a million workers
        x = i * step
        above = 0.5 * math.erfc(x / math.sqrt(2))
        total += -math.expm1(workers * math.log1p(-above)) - above**workers
    edge = 1 - 2 * 0.5**workers  # the trapezoid's end at 0
    return (total + edge / 2) * step
