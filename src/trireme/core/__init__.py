"""What crosses rooms: types, datums, weights, errors. Pure: imports neither Ray nor vLLM nor a room."""
