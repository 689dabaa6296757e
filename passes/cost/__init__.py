"""The predicted cost of a step: the rates of the machine, the time of kernels, the memory that they need."""
