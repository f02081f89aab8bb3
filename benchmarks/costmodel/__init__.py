"""The cost model against published measurements: loaders of their formats, predictions of the given configurations,
metrics, tables."""
