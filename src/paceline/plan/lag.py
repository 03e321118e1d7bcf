"""How long workers wait for the slowest one.

A step ends when the last worker has its gradients. If the compute time of each worker is an independent normal with deviation
s, the slowest of P workers is E[max of P normals] s behind the mean. The others wait that long on average.
"""

import functools
import math


@functools.cache
def expected_lag(workers: int) -> float:
    """The expected lag of the slowest worker behind the mean, in deviations: E[max of P normals].

    The integral of (1 - F^P) above 0 minus that of F^P below 0, with F the normal distribution: 0, 0.564, 0.846, 1.029, ...
    """
    if workers < 2:
        return 0.0
    step = 0.005
    total = 0.0
    for i in range(1, round(9 / step)):  # nothing is left beyond 9 deviations, even for a million workers
        x = i * step
        above = 0.5 * math.erfc(x / math.sqrt(2))
        total += -math.expm1(workers * math.log1p(-above)) - above**workers
    edge = 1 - 2 * 0.5**workers  # the trapezoid's end at 0
    return (total + edge / 2) * step
