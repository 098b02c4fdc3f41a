"""The orchestrator room: problems, environments, rollouts, the staleness ledger, and batches for the trainer.

`env` (interfaces) and `envs` (built in); `cursor` (order of problems); `rollout` (one episode); `ledger` (which group
is trained on when); `data` (trajectories to training data); `metrics`; `pipeline` (the loops that join them); `actor`
and `handle` (the Ray actor and the driver's side of it). Nothing here imports torch.
"""
