"""`deepspeed.runtime`: the modules of DeepSpeed's that scripts import from, as names only."""
