"""What a step costs: the rates of the machine, the time of kernels, the memory that they need."""
