"""The orchestrator room: problems, environments, rollouts, the staleness ledger, and batches for the trainer.

`env` and `message_env` (interfaces), `envs` (built in), `workers` (processes for slow calls); `cursor` (order of
problems); `rollout` (one episode), `group_runner` (one group); `ledger` (which group is trained on when); `advantages`
(trajectories to training data); `lockstep` (pace in deterministic mode); `admission` (how many rollouts are in flight);
`limits` (when a run stops by itself); `evaluation`, `metrics`, `recorder`; `pipeline` (the loops that join all of
these); `replicas` (the replicas that it samples from); `state` (what a checkpoint holds of the orchestrator); `actor`
and `handle` (the Ray actor, the driver's side). Nothing here imports torch.
"""
