"""09_layer_fallback, the three exercises.

1. All of layer 0's attention: 10 % of the FLOPs, and the modules with most k3. `recommend(table, 0.15)` gives a set,
   too; that it need not be better shows how far errors are from independent, and how small a sample is.
2. The sum of `in_k3` over the rows of o_proj, over the sum of all rows. What is measured differs a little: the table
   came from the other sample, and errors are only nearly independent.
3. The fallback belongs on both sides.
"""

from fp8lab.precision import PrecisionPlan

mine = PrecisionPlan.preset("fp8-rollout").with_bf16(modules=["model.layers.0.self_attn.*"], side="rollout")


def share(table):
    """What to type in, given the notebook's table."""
    return table["in_k3"][table["name"].str.endswith("o_proj")].sum() / table["in_k3"].sum()


even = PrecisionPlan.preset("fp8-e2e").with_bf16(first=1, side="both")
