"""How the nodes fare in Inductor and in compiled autograd: lowerings, order, a look at the generated code."""
