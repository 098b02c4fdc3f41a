"""."""

import trireme as trireme  # the paths that modules here had before (trireme.core.aliases)
