"""Names that other systems (TRL, verl, prime-rl, transformers) use for keys of the configuration."""

from __future__ import annotations

_OF_KEYS = {
    "checkpoint.every": "save_steps save_freq save_interval ckpt_interval",
    "eval.every": "eval_steps test_freq eval_interval",
    "inference.replicas": "num_engines rollout_gpus dp",
    "inference.sampling.max_tokens": "max_tokens max_new_tokens max_completion_length response_length",
    "inference.sampling.temperature": "temperature",
    "inference.tensor_parallel": "tp tensor_parallel_size tensor_model_parallel_size",
    "max_steps": "steps num_steps total_training_steps epochs num_train_epochs total_epochs",
    "model.max_seq_len": "seq_len max_length context_length model_len",
    "model.name": "model model_name model_path model_name_or_path pretrained",
    "orchestrator.advantage": "adv_estimator scale_rewards adv_type",
    "orchestrator.batch_size": "batch train_batch_size rollout_batch_size prompts_per_batch",
    "orchestrator.group_size": "n num_generations num_samples n_samples group samples_per_prompt",
    "orchestrator.max_prompt_len": "max_prompt_length prompt_length",
    "orchestrator.max_steps_off_policy": "max_async_level async_level staleness max_staleness off_policy",
    "run.output_dir": "out output save_dir checkpoint_dir default_local_dir",
    "trainer.checkpointing": "gradient_checkpointing activation_checkpointing ac activation_offloading ac_offloading",
    "trainer.kl.coef": "kl kl_coef kl_loss_coef",
    "trainer.learning_rate": "lr",
    "trainer.lora.rank": "r lora_r",
    "trainer.loss_fn": "grpo ppo gspo dapo rloo loss loss_type policy_loss algorithm",
    "trainer.loss_fn_config": "epsilon clip_ratio eps_clip",
    "trainer.micro_batch_tokens": "per_device_train_batch_size micro_batch ppo_micro_batch_size_per_gpu",
    "trainer.num_minibatches": "gradient_accumulation_steps",
    "trainer.num_substeps": "num_iterations ppo_epochs",
    "trainer.shards": "gpus num_gpus world_size fsdp",
    "mlflow.experiment": "mlflow_experiment experiment_name",
    "mlflow.tracking_uri": "mlflow_tracking_uri",
    "trackio.space_id": "trackio_space_id",
    "wandb.project": "wandb_project project_name report_to",
}
WORDS = {word: key for key, words in _OF_KEYS.items() for word in words.split()}
"""{name in another system: the key of this project that a user of that name probably means}. Each name is used only
where it is no key here."""
