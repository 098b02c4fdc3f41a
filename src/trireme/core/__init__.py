"""The part that all rooms share: types, datums, weights, errors. Pure: imports neither Ray nor vLLM nor a room."""
