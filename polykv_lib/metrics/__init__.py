"""Numbers from answers: pure functions of tensors, strings and arrays. No language model runs."""
