"""The cost model: seconds of an operator (compute) and of a collective (comm) on a device of a cluster, and bytes of a
parameter (memory). Called by problem.prices for plans and by autopar.calibrate, which fits its constants.
Formulas and sources: docs/cost-model.md."""
