"""Code that runs inside SGLang's processes: plugin, workers' part of weight updates, NCCL group."""
