"""What a trainer imports. Loads neither ray nor torch; `trainer_client.trl` loads torch where tensors are sent."""
