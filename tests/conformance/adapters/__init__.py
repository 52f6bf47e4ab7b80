"""One module a trainer: `COMPUTE` maps (kind, name) to a function of a case, `REFUSED` to why there is none.

A function takes the case and the floating type of its inputs and gives results under the names that
the case expects, or some of them. What it cannot do it says by raising `Unfit`.
"""
