"""Shared by all rooms: types, datums, weights, errors. Pure: imports neither Ray nor vLLM nor a room."""
