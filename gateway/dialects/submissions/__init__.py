"""/v1/rollouts: groups under one id, whose samples are delivered as they end and can be read again."""
