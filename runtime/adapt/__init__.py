"""What the runtime learns from step to step, so that the next step does better without compiling again."""
