"""Rankings of a model by constrained beams, measures of rankings, parts of several ranks, mixtures with a counter."""
