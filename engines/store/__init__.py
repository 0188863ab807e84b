"""The weight store: versions as folders of safetensors, what they hold, how they are written, fetched and kept."""
