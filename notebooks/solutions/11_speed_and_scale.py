"""11_speed_and_scale, the three exercises.

1. Answers of 50 tokens: the step is short, and the refit, which quantizes eight billion weights, is not.
2. A step takes 0.75 of the time, so in the same time there are 1 / 0.75 of them: a third more.
3. Blackwell's tensor cores take power-of-two scales; both sides need them, or the sides hold different bytes.
"""

from fp8lab.precision import PrecisionPlan
from fp8lab.speed import Workload

work = Workload(prompts=16, generations=16, response_tokens=50)
more = 1 / 0.75 - 1
plan = PrecisionPlan.preset("fp8-pow2")
