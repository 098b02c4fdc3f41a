"""The orchestrator room: problems, environments, rollouts, the staleness ledger, and batches for the trainer.

Its main modules: `env` and `message_env` (interfaces), `envs` (built-in environments), `workers` (processes for slow
calls); `cursor` (order of problems); `rollout` (one episode), `group_runner` (one group); `ledger` (which group is
trained on when); `advantages` (trajectories to training data); `lockstep` (pace in deterministic mode); `admission`
(how many rollouts are in flight); `limits` (when a run stops by itself); `evaluation`, `metrics`, `recorder`;
`pipeline` (the loops that join all of these); `requests` (the requests to the replicas); `state` (the orchestrator's
part of a checkpoint); `actor` and `handle` (the Ray actor, and the driver's side of it). An import of the package does
not import torch.
"""
