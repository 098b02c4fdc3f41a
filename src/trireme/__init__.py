"""The common part of all rooms: configuration, launch, the driver's loop, and the types that cross rooms.

The names in docs/api.md are stable: `trireme.api`, and for environments names of `trireme.renderers` and of four
modules of `orchestrator`. Everything else may change with any commit.
"""

import os

from trireme.core.own_packages import find_own_first

# Under `uv run`, Ray would start each worker through `uv run` again: a fresh environment of 200 packages per job.
# Workers use the environment of their node instead (docs/clusters.md). Ray reads this variable when it is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
find_own_first()
