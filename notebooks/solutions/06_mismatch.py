"""06_mismatch, the three exercises.

1. Ups and downs of the same size: k1 averages d, token_mult_prob_error exp(|d|). One large error and many small ones of
   the other sign do it as well. This is why k3 is reported.
2. E exp(|d|) of a Gaussian is 2 exp(sigma^2 / 2) Phi(sigma), about 1 + 0.8 sigma + sigma^2 / 2: 1.05 near 0.061. Its k3
   is 0.0018, above the limit of 1e-3: the two limits of one project disagree about the same engine.
3. `diagnostics.stale_layers(model, mystery.model)` compares the bytes of all layers and names one.
"""

differences = [0.3, -0.3, 0.3, -0.3]
sigma = 0.061
name = "model.layers.1.mlp.down_proj"
