"""The part of the project that all rooms share: configuration, launch, the driver's training loop, and the types of
what rooms send each other.

The names in docs/api.md are stable: `trireme.api`, and for environments names of `trireme.renderers` and of four
modules of `orchestrator`. Everything else may change with any commit.
"""

import os

from trireme.core.own_packages import find_own_first

# Under `uv run`, Ray would start each worker through `uv run` again: a fresh environment of 200 packages per job.
# Workers use the environment of their node instead (docs/clusters.md). Ray reads this variable when it is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
find_own_first()
