"""08_full_loop, the two exercises.

1. Only the dual clip bounds punishments: the objective of a token with negative advantage stops at delta * A, so any
   delta between 3 and 6 will do.
2. The interval is mean ± t * spread / sqrt(n), with t about 2: n is about (2 * spread / mean)^2.
"""

import statistics

changes = {"delta": 4.0}


def seeds(differences):
    """About how many, from paired differences."""
    return round((2.1 * statistics.stdev(differences) / statistics.fmean(differences)) ** 2)
