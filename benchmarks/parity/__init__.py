"""The same training by everybody: losses step by step, beside DeepSpeed's."""
