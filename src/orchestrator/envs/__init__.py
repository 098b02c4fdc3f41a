"""Built-in environments, listed in `orchestrator.env.BUILT_IN`."""
