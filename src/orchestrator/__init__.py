"""The orchestrator room: problems, environments, rollouts, the staleness ledger, and batches for the trainer.

`env` (interfaces) and `envs` (built in); `cursor` (order of problems); `rollout` (one episode); `ledger` (which group
is trained on when); `data` (trajectories to training data); `lockstep` (who waits for whom in deterministic mode);
`limits` (when a run stops by itself); `metrics`; `pipeline` (the loops that join them); `snapshot` (state as files);
`actor` and `handle` (the Ray actor and the driver's side of it). Nothing here imports torch.
"""

import trireme as trireme  # the paths that modules here had before (trireme.core.aliases)
