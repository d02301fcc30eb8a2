"""The chunk memory manager: a library of its own, without modules, optimizers or process groups."""
