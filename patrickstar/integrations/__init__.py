"""PatrickStar inside other frameworks, each an extra that is imported only when it is used.

- `patrickstar.integrations.accelerate.Accelerator` for Hugging Face Accelerate;
- `patrickstar.integrations.transformers.Trainer` for Hugging Face's Trainer;
- `patrickstar.integrations.lightning.PatrickStarStrategy` for Lightning.

What they have in common: the framework keeps the loop, the data, the schedule and the callbacks;
the engine has the model's state, the backward, the clipping, the update and their checkpoint.
"""
