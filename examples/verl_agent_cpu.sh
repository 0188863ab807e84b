#!/usr/bin/env bash
# verl's GRPO trainer on sessions of an agent with a tool, as examples/verl_cpu.sh otherwise:
#
#     examples/verl_agent_cpu.sh http://127.0.0.1:8100 [KEY=VALUE ...]
#
# The first two keys are what an agent needs. The last gives the importance ratio, rollout_corr/rollout_is_mean.
set -euo pipefail
url="${1:?give the rollout URL, such as http://127.0.0.1:8100}"
exec "$(dirname "$0")/verl_cpu.sh" "$url" \
  actor_rollout_ref.rollout.agent.agent_loop_config_path=examples/verl_agent.yaml \
  actor_rollout_ref.rollout.agent.default_agent_loop=sort_agent \
  actor_rollout_ref.rollout.n=8 \
  data.max_response_length=64 \
  data.shuffle=False \
  trainer.total_training_steps=24 \
  algorithm.rollout_correction.rollout_is=token \
  "${@:2}"
