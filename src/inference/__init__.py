"""The inference room: vLLM replicas and the router in front of them."""

import trireme as trireme  # the paths that modules here had before (trireme.core.aliases)
