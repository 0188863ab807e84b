"""Checkpoints as folders: their tensors, the names of these for trainers, LoRA adapters."""
