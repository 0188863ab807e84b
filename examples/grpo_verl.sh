#!/usr/bin/env bash
# verl's GRPO trainer against the fleet of examples/grpo.yaml, on the GPUs that are left:
#
#     CUDA_VISIBLE_DEVICES=4,5,6,7 examples/grpo_verl.sh [KEY=VALUE ...]
#
# The first three keys are what a gateway needs. The data are those of verl's own GSM8K example.
set -euo pipefail
exec python3 -m verl.trainer.main_ppo \
  trainer.v1.trainer_mode=gateway \
  +trainer.v1.gateway.url=http://127.0.0.1:8100 \
  +ray_kwargs.ray_init.address=local \
  algorithm.adv_estimator=grpo \
  critic.enable=False \
  data.train_files="$HOME/data/gsm8k/train.parquet" \
  data.val_files="$HOME/data/gsm8k/test.parquet" \
  data.train_batch_size=128 \
  data.max_prompt_length=1024 \
  data.max_response_length=3072 \
  actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.use_kl_loss=False \
  trainer.logger=console \
  trainer.val_before_train=False \
  trainer.n_gpus_per_node=4 \
  trainer.nnodes=1 \
  trainer.save_freq=50 \
  trainer.test_freq=10 \
  trainer.total_training_steps=500 \
  "$@"
