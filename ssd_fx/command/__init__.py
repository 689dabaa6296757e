"""The commands of `ssd-fx` that look at a machine. Each module has `add(commands)` and `run(flags)`."""
