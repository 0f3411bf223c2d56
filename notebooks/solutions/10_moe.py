"""10_moe, the three exercises.

1. 1 - 0.9^27 = 0.942. Independent layers would bring 48 of them to 99 %: where it is less, changes in several layers
   fall on the same tokens.
2. 1 - (120/128)^11 = 0.51: with eleven sequences, half of the experts are read.
3. The first layer: its error is in the hidden state that every later router reads. All experts in BF16 cost twice the
   budget and change little here, because attention comes before each router as well.
"""

layers = 27
batch = 11
keep = {"first": 1, "side": "rollout"}
