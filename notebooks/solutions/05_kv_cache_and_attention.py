"""05_kv_cache_and_attention, the three exercises.

1. E4M3's smallest number is 2^-9; half of it, 2^-10, is a tie that goes to the even code, zero. Divided by 256: 2^-18.
2. Scales are taken once and must hold for 20 updates: 1.005^20 = 1.105.
3. Keys and values, 32 layers, 8 heads, each 128 codes of one byte and a scale of four: 2 * 32 * 8 * (128 + 4). Query
   heads do not count: nothing of q is cached.
"""

smallest = 2.0**-18
margin = 1.11
bytes_per_token = 2 * 32 * 8 * (128 + 4)
