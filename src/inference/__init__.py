"""The inference room: vLLM replicas and the router in front of them."""
