"""07_importance_sampling, the three exercises.

1. The mean of 500 values of 3 % scatters by 0.13 %, and a drift of 10 % stands far outside of a 1 % band. (The log of
   the product scatters by 0.67; a band from exp(-1.4) to exp(1.4) works as well, since a drift of 10 % per token makes
   a log ratio of 48.)
2. In verl a pair of thresholds, "low_high", rejects tokens outside, which is IcePop.
3. (1000 + x)^2 = (1000 + x^2) 1001 / 2 has its solution near 34.
"""

band = ("geometric", 0.99, 1.01)
verl = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
x = 34.5
