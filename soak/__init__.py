"""Long tests: what is promised, tried until it breaks. `make soak` runs them; see `soak.run`."""
