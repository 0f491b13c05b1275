"""One module an experiment; each has `run(params, say) -> Outcome` and knows no notebook."""
