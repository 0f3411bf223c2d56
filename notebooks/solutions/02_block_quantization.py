"""02_block_quantization, both exercises.

1. One scale for a row of 128 is 32 values a kilobyte: small enough. A whole row as one block misses the decibels.
2. A column block shares its scale among tokens instead of channels, so ordinary channels never meet an outlier.
"""

activation_block = (1, 128)
column_block = (128, 1)
