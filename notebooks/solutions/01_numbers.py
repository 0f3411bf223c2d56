"""01_numbers, the three exercises.

1. 0.4375 = 2^-2 x 1.75: exponent field -2 + 7 = 5 (0101), fraction 0.75 x 8 = 6 (110), so 0 0101 110.
2. Anything from about 690 up is clamped to 448; 0.0014 lies among the subnormals and becomes 0.00195.
3. The largest element must stay below 448: 448 / 4e-4 is about 1.1 million. A power of two changes no fraction bit.
"""

code = 0b0_0101_110
number = 1000.0
multiplier = 2.0**20
