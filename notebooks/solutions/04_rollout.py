"""04_rollout, both exercises.

1. A lower temperature sharpens the distribution; with the first validation prompt 0.95 is enough.
2. Read off the figure: between 1e-6 (about 0.1 %) and 1e-4 (about 10 %) lies 1e-5.
"""

temperature = 0.95
learning_rate = 1e-5
